"""Programs that show a run's figures while it trains: TensorBoard and MLflow, if `train.log_to` names them.

A thread writes to them, because a server may be slow. If one fails, that is reported, and the run continues without it.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep import paths
from lockstep.config.settings import Settings
from lockstep.errors import brief


class Trackers:
    """All trackers of `train.log_to`, used as one. `say` is called with a warning if one fails."""

    def __init__(self, folder: Path, settings: Settings, say: Callable[[str], None]):
        self.say, self.open = say, {}
        self.thread = ThreadPoolExecutor(max_workers=1)  # the thread starts with the first task
        for name in settings.train.log_to:
            self.thread.submit(self._start, name, folder, settings)

    def add(self, step: int, figures: dict[str, float]) -> None:
        self.thread.submit(self._each, lambda tracker: tracker.add(step, figures))

    def close(self) -> None:
        self.thread.submit(self._each, lambda tracker: tracker.close())
        self.thread.shutdown()

    def _start(self, name: str, folder: Path, settings: Settings) -> None:
        try:
            self.open[name] = {"tensorboard": TensorBoard, "mlflow": MLflow}[name](folder, settings)
        except Exception as error:  # a library and its server may fail in any way
            self.say(f"warning: {name} records nothing of this run: {brief(error)}")

    def _each(self, do: Callable) -> None:
        for name, tracker in list(self.open.items()):
            try:
                do(tracker)
            except Exception as error:
                del self.open[name]
                self.say(f"warning: {name} records no more of this run: {brief(error)}")


class TensorBoard:
    """Event files in the run's folder; `tensorboard --logdir results/runs` shows all rows side by side."""

    def __init__(self, folder: Path, settings: Settings):
        from tensorboardX import SummaryWriter

        self.writer = SummaryWriter(str(folder / paths.TENSORBOARD))

    def add(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class MLflow:
    """A run of the experiment `lockstep` (or MLFLOW_EXPERIMENT_NAME) on the server of MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, settings: Settings):
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # otherwise a server that is down costs minutes
        import mlflow

        self.client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "lockstep")
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.client.create_experiment(name)
        self.run = self.client.create_run(number, run_name="/".join(folder.parts[-3:])).info.run_id
        for key, value in settings.of_row()["train"].items():
            self.client.log_param(self.run, key, value)
        for key in ("row", "strategy", "precision", "config_hash", "saved"):
            self.client.set_tag(self.run, f"lockstep.{key}", getattr(settings, key))

    def add(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.client.log_metric(self.run, name, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.run)

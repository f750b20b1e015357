"""Programs that show a run's figures while it trains: TensorBoard and MLflow, each where `train.log_to` names it.

They are written to by a thread, as a server may be slow; one that fails is told of, and the run goes on without it.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep import paths
from lockstep.config.settings import Settings
from lockstep.errors import brief


class Trackers:
    """All trackers of `train.log_to`, used as one. `say` is told where one fails."""

    def __init__(self, folder: Path, settings: Settings, say: Callable[[str], None]):
        self.say, self.open = say, {}
        self.thread = ThreadPoolExecutor(max_workers=1)  # which starts with the first thing to do
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
        except Exception as error:  # whatever a library and its server come upon
            self.say(f"warning: {name} gets nothing of this run: {brief(error)}")

    def _each(self, do: Callable) -> None:
        for name, tracker in list(self.open.items()):
            try:
                do(tracker)
            except Exception as error:
                del self.open[name]
                self.say(f"warning: {name} gets no more of this run: {brief(error)}")


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir results/runs` shows all rows beside each other."""

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
    """A run of the experiment `lockstep` (or MLFLOW_EXPERIMENT_NAME) where MLFLOW_TRACKING_URI says."""

    def __init__(self, folder: Path, settings: Settings):
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # else a server that is gone takes minutes
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

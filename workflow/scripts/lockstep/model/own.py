"""Models that are plain torch.nn.Modules: a user's own (my_model.py:MyModel) and Lockstep's small networks.

Such a model is stored as model.safetensors and model.json, which holds its class, its constructor's arguments and its
labels. A user's own model also stores a copy of its Python file. Naming the file in the configuration is the consent to
run it. A stored copy is run only if its content was named in this project before, so that somebody else's results
folder or model can't run code here.
"""

import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lockstep.config.sections import OWN
from lockstep.errors import BadInput, brief
from lockstep.files import hash_file, read_json, write_json
from lockstep.paths import PROJECT

TRUSTED = PROJECT / ".snakemake" / "lockstep-trusted"  # sha256 of each file that the user named; never copied along
EVERY_MODULES = frozenset(vars(torch.nn.Module()))  # the attributes that every module has
ABOUT, WEIGHTS, CODE = "model.json", "model.safetensors", "model.py"


def initialise(name: str, sizes: dict, seed: int) -> torch.nn.Module:
    """A new model of the class `name`, such as my_model.py:MyModel or lockstep.model.convnets:BasicNet.

    sizes: what the task knows of its data; the constructor gets those that its parameters name. Raises BadInput if the
    file or the class can't be used; the message contains the original error and its line.
    """
    file, cls = None, None
    if match := OWN.fullmatch(name):
        file = Path(match["file"])
        _trust(file)
        cls = _class(file, match["name"], f"model.name: {name}")
    else:
        module, _, class_name = name.partition(":")
        cls = getattr(importlib.import_module(module), class_name)
    wants = inspect.signature(cls).parameters
    unknown = [
        parameter.name
        for parameter in wants.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in sizes
    ]
    if unknown:
        raise BadInput(
            f"model.name: {name}: its constructor requires {', '.join(unknown)}, but this task passes"
            f" {', '.join(sizes)}. Use these names for what you need, and give other parameters a default."
        )
    arguments = {key: value for key, value in sizes.items() if key in wants}
    torch.manual_seed(seed)
    try:
        model = cls(**arguments)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise BadInput(f"model.name: {name} can't be created: {_at(error, file)}") from None
    others = {
        f"{key} in {str(parameter.dtype).removeprefix('torch.')}"
        for key, parameter in model.named_parameters()
        if parameter.dtype != torch.float32
    }
    if others:
        raise BadInput(
            f"model.name: {name} has {min(others)}, but weights are kept in float32. Leave the parameters in float32;"
            " train.precision sets the type for computing."
        )
    _require_registered(model, name)
    model.lockstep = {"class": name, "arguments": arguments}
    if file:
        model.lockstep |= {"class": match["name"], "code": file.read_bytes()}
    return model


def _require_registered(model: torch.nn.Module, name: str) -> None:
    """Raise BadInput if modules or parameters are in a plain list or dict, where PyTorch does not register them."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if attribute not in EVERY_MODULES and any(
                isinstance(v, torch.nn.Module | torch.nn.Parameter) for v in inside
            ):
                where = f"{path}.{attribute}" if path else attribute
                raise BadInput(
                    f"model.name: {name}: {where} is a plain {type(value).__name__} of modules or parameters, which is"
                    " neither trained nor stored. Make it a torch.nn.ModuleList, ModuleDict or ParameterList."
                )


def require_scores(model: torch.nn.Module, inputs: dict, shape: tuple[int, ...], owners: str) -> None:
    """Raise BadInput if the model's output for one sample (`inputs`) does not have this shape.

    owners: what the scores belong to, for the message, such as "2 classes".
    """
    name = model.lockstep["class"]
    try:
        with torch.no_grad():
            outputs = model.eval()(**inputs)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        given = ", ".join(f"{key} {list(value.shape)}" for key, value in inputs.items())
        raise BadInput(f"model.name: {name} fails on a sample ({given}): {where(error, model)}") from None
    model.train()
    scores = getattr(outputs, "logits", outputs)
    if not isinstance(scores, torch.Tensor) or scores.shape != shape:
        returned = list(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        raise BadInput(
            f"model.name: {name} returns {returned} for one sample, but must return the scores of {owners}:"
            f" a tensor {list(shape)}, or an object that has it as `logits`."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInput(f"model.name: {name} has no parameter to train. Leave requires_grad True for some.")


def save(model: torch.nn.Module, folder: Path, labels: list[str] | None = None) -> None:
    """Write a model from `initialise` or `build` into `folder`."""
    about = dict(model.lockstep)
    if labels is not None:
        about["labels"] = labels
    code = about.pop("code", None)
    if code is not None:
        (folder / CODE).write_bytes(code)
        about["code_sha256"] = hashlib.sha256(code).hexdigest()
    write_json(folder / ABOUT, about)
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise BadInput(
                f"model.name: {about['class']}: {name} in its state dict is not a dense tensor, so it can't be stored."
            )
    save_file(separate_copies(model.state_dict()), folder / WEIGHTS, metadata={"format": "pt"})


def separate_copies(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of each tensor in host memory; safetensors refuses tensors that share memory, as tied weights do."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}


def build(folder: Path) -> torch.nn.Module:
    """A model of the class and size stored in `folder`, with arbitrary weights."""
    about = read_json(folder / ABOUT)
    code = None
    if "code_sha256" in about:
        code = (folder / CODE).read_bytes()
        if hashlib.sha256(code).hexdigest() != about["code_sha256"]:
            raise BadInput(f"{folder / CODE} has changed since the model was stored. Prepare the data again.")
        if about["code_sha256"] not in _trusted():
            raise BadInput(
                f"{folder / CODE} is code that was never named in this project, so it was not run. Read it; to trust"
                f" it, add its sha256 to {TRUSTED}."
            )
        cls = _class(folder / CODE, about["class"], str(folder))
    else:
        module, _, name = about["class"].partition(":")
        if not module.startswith("lockstep."):
            raise BadInput(f"{folder / ABOUT}: {about['class']} is not a model of Lockstep's.")
        cls = getattr(importlib.import_module(module), name)
        if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
            raise BadInput(f"{folder / ABOUT}: {about['class']} is not a model.")
    model = cls(**about["arguments"])
    model.lockstep = {key: about[key] for key in ("class", "arguments", "labels") if key in about}
    if code is not None:
        model.lockstep["code"] = code
    return model


def load(folder: Path) -> torch.nn.Module:
    """The model stored in `folder`, on the CPU."""
    model = build(folder)
    try:
        model.load_state_dict(load_file(folder / WEIGHTS), strict=True)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise BadInput(f"{folder}: can't be read as a model: {brief(error)}") from None
    return model


def is_stored(folder: Path) -> bool:
    return (folder / ABOUT).is_file()


def labels(folder: Path) -> list[str] | None:
    return json.loads((folder / ABOUT).read_text(encoding="utf-8")).get("labels")


def _trusted() -> set[str]:
    return set(TRUSTED.read_text(encoding="utf-8").split()) if TRUSTED.is_file() else set()


def _trust(file: Path) -> None:
    """Remember that the user named this file."""
    if file.is_file() and (digest := hash_file(file)) not in _trusted():
        TRUSTED.parent.mkdir(parents=True, exist_ok=True)
        with TRUSTED.open("a", encoding="utf-8") as stream:
            stream.write(f"{digest}\n")


def _class(file: Path, name: str, where: str) -> type:
    """Run a Python file and return its class `name`. Raises BadInput with the file's own error and its line."""
    if not file.is_file():
        raise BadInput(f"{where}: {file} is not a file. Name an existing one, as in my_model.py:MyModel.")
    module_name = f"lockstep_own_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # torch and pickle look classes up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise BadInput(f"{where}: {file} can't be imported: {_at(error, file)}") from None
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, torch.nn.Module) and value.__module__ == module_name
        ]
        has = f"it has {', '.join(classes)}" if classes else "it has none"
        raise BadInput(f"{where}: {file} has no class {name} that is a torch.nn.Module; {has}.")
    return cls


def where(error: BaseException, model: torch.nn.Module) -> str:
    """The message of an error, with its line in the file of the model's class."""
    return _at(error, Path(inspect.getfile(type(model))))


def _at(error: BaseException, file: Path | None) -> str:
    """The message of an error, with the line of `file` at which it was raised."""
    line = None
    if isinstance(error, SyntaxError):
        line = error.lineno
    elif file:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename) == file.resolve()
        ]
        line = lines[-1] if lines else None
    message = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else brief(error)}"
    return f"line {line}: {message}" if line else message

"""A model by its shape: nothing of it is stored or downloaded."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.config.reading import load_yaml
from lockstep.errors import BadInput, brief
from lockstep.files import read_json

# The class of transformers that trains each task; a configuration's own architecture names its task otherwise.
CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "language-modelling": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
}


@dataclass(frozen=True)
class Model:
    """config: the content of a config.json of transformers; length: tokens of a sample, if it is a text.

    dropout: for every dropout layer; None keeps the configuration's own.
    """

    config: dict
    length: int
    dropout: float | None = None


def read(path: Path, task: str, length: int) -> Model:
    """The model that a file describes, for samples of `length` tokens.

    path: a folder with a config.json of transformers, such a file, or one in YAML with the same keys, of which
    model_type is needed and the others have transformers' defaults. Raises BadInput.
    """
    from transformers import AutoConfig

    if task not in CLASSES:
        raise BadInput(f"task: {task} is not foretold. Choose one of {', '.join(CLASSES)}.")
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise BadInput(f"--model {path}: no such file. Name a config.json of transformers, its folder, or a YAML file.")
    keys = load_yaml(file) if file.suffix in (".yaml", ".yml") else read_json(file)
    if not isinstance(keys, dict) or "model_type" not in keys:
        raise BadInput(f"--model {file}: has no key model_type. Write one, as in model_type: llama.")
    try:
        config = AutoConfig.for_model(**keys)
    except Exception as error:  # a configuration may raise anything
        raise BadInput(f"--model {file}: transformers does not take it: {brief(error)}") from None
    most = getattr(config, "max_position_embeddings", None)
    if task != "image-classification" and most and length > most:
        raise BadInput(f"--length {length}: the model takes texts of at most {most} tokens. Lower it.")
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # where each decoder of transformers has its own default
    config.architectures = [_class(config, task, file)]
    return Model(config.to_dict(), length)


def _class(config, task: str, file: Path) -> str:
    import transformers

    known = getattr(transformers, CLASSES[task])._model_mapping
    if type(config) not in known:
        raise BadInput(f"--model {file}: transformers has no {config.model_type} for {task}. Choose another --task.")
    cls = known[type(config)]
    return (cls[0] if isinstance(cls, tuple) else cls).__name__

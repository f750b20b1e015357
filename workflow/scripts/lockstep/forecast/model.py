"""A model by its shape: nothing of it is stored or downloaded."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.config import schema
from lockstep.config.reading import load_yaml
from lockstep.errors import BadInput, brief
from lockstep.files import read_json

# The class of transformers that trains each task; a configuration's own architecture names its task otherwise.
CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "language-modelling": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
}
# Models whose first position is the padding token's number plus one, so that their longest text is that much shorter.
AFTER_PADDING = ("camembert", "data2vec-text", "mpnet", "roberta", "roberta-prelayernorm")
AFTER_PADDING += ("xlm-roberta", "xlm-roberta-xl")


@dataclass(frozen=True)
class Model:
    """config: the content of a config.json of transformers; length: tokens of a sample, if it is a text.

    dropout: for every dropout layer; None keeps the configuration's own.
    """

    config: dict
    length: int
    dropout: float | None = None


def read(path: Path, task: str, length: int, image_size: int | None = None) -> Model:
    """The model that a file describes, for samples of `length` tokens, or images of `image_size` pixels each way.

    path: a folder with a config.json of transformers, such a file, or one in YAML with the same keys, of which
    model_type is needed and the others have transformers' defaults. Raises BadInput.
    """
    from transformers import AutoConfig

    if task not in CLASSES:
        raise BadInput(f"task: {task} is not counted. Choose one of {', '.join(CLASSES)}.")
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise BadInput(
            f"--model {path}: has no config.json of transformers. Name one, its folder, or a YAML file with its keys; a"
            " model of your own is not counted."
        )
    yaml = file.suffix in (".yaml", ".yml")
    keys = load_yaml(file) if yaml else read_json(file)
    if not isinstance(keys, dict) or "model_type" not in keys:
        raise BadInput(f"--model {file}: has no key model_type. Write one, as in model_type: llama.")
    try:
        if yaml:
            _refuse_unknown(keys, AutoConfig.for_model(keys["model_type"]), file)
        config = AutoConfig.for_model(**_in_fp32(keys))
    except BadInput:
        raise
    except Exception as error:  # a configuration may raise anything
        raise BadInput(f"--model {file}: transformers does not take it: {brief(error)}") from None
    most = getattr(config, "max_position_embeddings", None)
    if most and config.model_type in AFTER_PADDING:
        most -= (config.pad_token_id or 0) + 1
    if task != "image-classification" and most and length > most:
        raise BadInput(f"--length {length}: the model takes texts of at most {most} tokens. Lower it.")
    if "quantization_config" in keys:
        raise BadInput(f"--model {file}: is quantised, which no row trains. Take quantization_config out.")
    if experts := [name for name in config.to_dict() if "expert" in name]:
        raise BadInput(
            f"--model {file}: a mixture of experts ({experts[0]}) is not counted: values decide which compute."
        )
    config.architectures = [_class(config, task, file)]
    _complete(config, task, image_size, file)
    return Model(config.to_dict(), length)


def _in_fp32(keys: dict) -> dict:
    """A configuration without types of weights, as rows train fp32 weights whatever a model was saved in."""
    kept = {name: value for name, value in keys.items() if name not in ("dtype", "torch_dtype")}
    return {name: _in_fp32(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _refuse_unknown(keys: dict, default, file: Path) -> None:
    """Raise BadInput for a key that this kind of model does not have; transformers would ignore it."""
    known = [*default.to_dict(), *default.attribute_map]
    for name in keys:
        if not hasattr(default, name):
            raise BadInput(f"--model {file}: {name}: no key of a {default.model_type}.{schema.hint(name, known)}")


def _complete(config, task: str, image_size: int | None, file: Path) -> None:
    """Set the keys that a row sets or needs, in addition to those of the model's own configuration."""
    config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # where each decoder of transformers has its own default
    if task == "text-classification" and getattr(config, "pad_token_id", None) is None:
        end = getattr(config, "eos_token_id", None)
        config.pad_token_id = end if isinstance(end, int) else 0  # else it takes no batch of several texts
    if task == "image-classification" and image_size:
        config.image_size = image_size
    elif task == "image-classification" and not hasattr(config, "image_size"):
        raise BadInput(f"--model {file}: takes images of any size. Say which: --set data.image_size=224")


def _class(config, task: str, file: Path) -> str:
    import transformers

    known = getattr(transformers, CLASSES[task])._model_mapping
    if type(config) not in known:
        raise BadInput(f"--model {file}: transformers has no {config.model_type} for {task}. Choose another --task.")
    cls = known[type(config)]
    return (cls[0] if isinstance(cls, tuple) else cls).__name__

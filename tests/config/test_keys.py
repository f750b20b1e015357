"""A key of the configuration is declared once; the schema, and the comparisons that ignore it, are derived from it."""

from dataclasses import dataclass

import pytest
from jsonschema import Draft202012Validator

from lockstep.config import keys, reading, schema
from lockstep.config.configuration import NOTHING_BESIDES
from lockstep.config.keys import MODEL, NOTHING, SPEED, key
from lockstep.config.nested import ABSENT, differing, flat, without
from lockstep.config.sections import AskedHardware, Train
from lockstep.config.settings import deciding
from lockstep.errors import BadInput


@dataclass(frozen=True)
class Section:
    width: int | None = key(3, "How wide.", minimum=1, decides=SPEED)
    names: list[str] = key([], "Which.", items={"minLength": 2}, decides=NOTHING)
    share: dict[str, float] | None = key(None, "What of each.", values={"maximum": 1})
    kind: str = key("a", "Of which kind.", one_of=("a", "b"), of=("width", ("3",)))


def test_a_section_s_schema_follows_from_its_fields():
    made = keys.schema(Section)
    Draft202012Validator.check_schema(made)
    assert made["properties"] == {
        "width": {"type": ["integer", "null"], "minimum": 1, "default": 3, "description": "How wide."},
        "names": {
            "type": "array",
            "items": {"type": "string", "minLength": 2},
            "default": [],
            "description": "Which.",
        },
        "share": {
            "type": ["object", "null"],
            "additionalProperties": {"type": "number", "maximum": 1},
            "default": None,
            "description": "What of each.",
        },
        "kind": {"enum": ["a", "b"], "default": "a", "description": "Of which kind."},
    }
    with pytest.raises(BadInput, match=r"here: names\.0: .* is too short"):
        schema.check({"names": ["x"]}, made, "here")
    assert schema.fill({}, made) == {"width": 3, "names": [], "share": None, "kind": "a"}
    assert [keys.names(Section, role) for role in (MODEL, SPEED, NOTHING)] == [
        ("share", "kind"),
        ("width",),
        ("names",),
    ]


def test_a_value_that_no_key_takes_is_refused_with_what_it_means():
    Draft202012Validator.check_schema(schema.of_configuration())
    with pytest.raises(BadInput, match=r"train\.schedule: 'linaer' is not one of constant, linear.* after warm-up"):
        reading.parse({"train": {"schedule": "linaer"}})


# A new key that does not decide the model must be added here, so that nobody forgets to say what it decides.
def test_what_each_key_decides():
    nothing = {"device_batch", "checkpoint_every", "keep", "log_every", "log_to", "pictures_every"}
    speed = {"accumulation", "precision", "attention", "activation_checkpointing", "eval_every", "eval_samples"}
    speed |= {"checkpoint", "best"}
    assert set(keys.names(Train, NOTHING)) == nothing
    assert set(keys.names(Train, SPEED)) == speed | {"snapshot_every"}
    nothing = {"port", "timeout", "oversubscribe", "world_sizes"}
    assert set(keys.names(AskedHardware, NOTHING)) == nothing
    assert keys.names(AskedHardware, MODEL) == ()
    assert {"eval_every": 0, "checkpoint": "last", "log_to": []}.items() <= NOTHING_BESIDES.items()


def rows(**settings):
    return reading.parse({"rows": {"x": {"strategy": "ddp", "device": "cpu", "processes": 1} | settings}}).rows["x"]


@pytest.mark.parametrize(
    ("settings", "decides", "division"),
    [
        ({"log_every": 5}, False, "closed"),
        ({"port": 29000}, False, "closed"),
        ({"precision": "bf16"}, True, "closed"),
        ({"label_smoothing": 0.1}, True, "open"),
    ],
)
def test_a_row_is_out_of_date_and_open_by_what_its_keys_decide(settings, decides, division):
    plain, row = rows(), rows(**settings)
    assert (row.deciding() != plain.deciding()) == decides
    assert row.division == division


def test_the_network_between_machines_decides_a_row_on_several_of_them_only():
    several = {"nodes": 2, "oversubscribe": True}
    assert rows(**several, interface="ib0").deciding() != rows(**several).deciding()
    assert rows(interface="ib0").deciding() == rows().deciding()


def test_nested_settings_differ_by_name_and_a_mapping_that_is_a_value_is_one():
    before = {"row": "ddp", "train": {"epochs": 2, "loss_weights": {"boundary": 0.5}}, "data": {"splits": {"dev": 0.1}}}
    after = {"row": "ddp", "train": {"epochs": 3, "loss_weights": {"edge": 0.5}}, "data": {"splits": {"dev": 0.2}}}
    assert list(differing(before, after)) == [
        ("train.epochs", 2, 3),
        ("train.loss_weights", {"boundary": 0.5}, {"edge": 0.5}),
        ("data.splits.dev", 0.1, 0.2),
    ]
    assert list(differing({"train": {"old": 1}}, {"train": {}, "new": 2})) == [
        ("train.old", 1, ABSENT),
        ("new", ABSENT, 2),
    ]
    assert list(differing(before, before)) == []
    assert flat({"row": "ddp", "train": {"epochs": 2}}) == {"row": "ddp", "train.epochs": 2}
    assert without(before, {"train": ("epochs",)})["train"] == {"loss_weights": {"boundary": 0.5}}
    whole = {"row": "x", "train": {"epochs": 1, "keep": 3}, "hardware": {"threads": 1, "port": "auto"}}
    assert deciding(whole) == {"row": "x", "train": {"epochs": 1}, "hardware": {"threads": 1}}

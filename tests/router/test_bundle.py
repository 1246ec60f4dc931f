import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from speccascade.router import bundle
from speccascade.router import config as config_module
from speccascade.router.bundle import find_bundle, load_bundle, save_bundle
from speccascade.router.config import CalibrationRow, RouterConfig
from speccascade.router.features import FEATURE_SETS
from speccascade.router.heads import RouterHead

_ROW = {"alpha": 0.1, "deferral": 0.1, "rejection": 0.1, "quality": 0.5}
FILES = {"router.onnx", "head.safetensors", "router_config.json", "README.md"}


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "router"))


@pytest.fixture
def instant_export(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the export where a test is about the files around it."""
    content = (exported / "router.onnx").read_bytes() + b"\x00"
    monkeypatch.setattr(bundle, "export_onnx", lambda head, path: path.write_bytes(content))


def rewrite(directory: Path, **changes: Any) -> None:
    """Change keys of the config and sign it again, as a careful stranger would."""
    path = directory / "router_config.json"
    content = json.loads(path.read_text()) | changes
    del content["digest"]
    path.write_text(json.dumps(content | {"digest": config_module._digest(content)}))


def test_a_bundle_says_what_it_is(exported: Path, config: RouterConfig) -> None:
    loaded = load_bundle(exported)
    assert {path.name for path in exported.iterdir()} == FILES
    stated = loaded.config
    for field in ("drafter", "verifier", "vocabulary_fingerprint", "trace_digest", "calibration", "figures", "task"):
        assert getattr(stated, field) == getattr(config, field), field
    assert (stated.kind, stated.estimator, stated.hidden) == ("mlp", "two_confidence", (16, 16))
    assert stated.features == FEATURE_SETS["verified"]
    assert {"speccascade", "python", "torch", "onnxruntime"} <= set(stated.versions)
    assert stated.opset == 20 and set(stated.files) == {"router.onnx", "head.safetensors"}
    assert RouterConfig.from_json(stated.to_json()) == stated


def test_weights_come_back_as_they_were(exported: Path, weighted_head: Callable[..., RouterHead]) -> None:
    original, loaded = weighted_head(estimator="two_confidence"), load_bundle(exported).head()
    for name, values in original.state_dict().items():
        assert torch.equal(values, loaded.state_dict()[name]), name


@pytest.mark.parametrize("name", sorted(FILES - {"README.md"}))
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load_bundle(copy)


@pytest.mark.parametrize("name", ["router.onnx", "head.safetensors"])
def test_a_changed_file_is_named(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: its content does not fit the digest"):
        load_bundle(copy)


def test_a_changed_number_in_the_config_is_noticed(copy: Path) -> None:
    path = copy / "router_config.json"
    text = path.read_text()
    assert text.count('"default_alpha": 0.3') == 1
    path.write_text(text.replace('"default_alpha": 0.3', '"default_alpha": 0.4'))
    with pytest.raises(ValueError, match=r"router_config\.json: its content does not fit its digest"):
        load_bundle(copy)


def test_a_changed_card_is_nobodys_business(copy: Path) -> None:
    (copy / "README.md").write_text("my notes")
    load_bundle(copy)


def test_a_changed_feature_schema_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FEATURE_SETS, "verified", FEATURE_SETS["verified"][::-1])
    with pytest.raises(ValueError, match="feature_schema: the features 'verified' changed since"):
        load_bundle(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 3}, "expected schema_version 2, got 3"),
        ({"schema_version": 1}, "expected schema_version 2, got 1 .*; export it again from its checkpoint"),
        ({"kinds": "mlp"}, "unknown key 'kinds'; did you mean 'kind'"),
        ({"hidden": "16"}, "expected 'hidden' to be of type list"),
        ({"default_alpha": True}, "expected 'default_alpha' to be of type int or float"),
        ({"kind": "tree"}, "kind: expected one of linear, mlp, trees, pooled, attention, got 'tree'"),
        ({"feature_set": "verifid"}, "feature_set: .*did you mean 'verified'"),
        ({"losses": ["sampled", "zeroone"]}, "losses: .*did you mean 'zero_one'"),
        ({"context": 2}, "context: expected 0 for kind 'mlp'"),
        ({"int8": 1}, "expected 'int8' to be of type bool"),
        ({"files": {"router.onnx": "0"}}, "expected digests of"),
        ({"files": {"../../etc/passwd": "0"}}, "expected digests of"),
        ({"calibration": {"cold": []}}, "calibration: expected one of greedy, sampled, got 'cold'"),
        ({"calibration": {"greedy": 3}}, "calibration: expected a list of rows"),
        ({"calibration": {"greedy": [{"alpha": 0.1}]}}, "a row lacks deferral, rejection, quality"),
        (
            {"calibration": {"greedy": [_ROW | {"drop_upper": 0.1}]}},
            "drop_upper: expected bounds by confidence",
        ),
        ({"calibration_exact": 1}, "expected 'calibration_exact' to be of type bool, got 1"),
        ({"calibration_documents": True}, "expected 'calibration_documents' to be of type int, got True"),
        ({"reference": {"tv_raw": 0.1}}, "reference tv_raw: expected a list of numbers, got 0.1"),
        ({"reference": {"tv_raw": [0.1, None]}}, "reference tv_raw: expected a finite number, got None"),
        ({"hidden": [None]}, r"expected 'hidden' to be a list of int, got \[None\]"),
        ({"hidden": [16.0]}, r"expected 'hidden' to be a list of int, got \[16\.0\]"),
        ({"features": [1]}, r"expected 'features' to be a list of str, got \[1\]"),
        ({"calibration": {"greedy": [{"alfa": 0.1}]}}, "got 'alfa'; did you mean 'alpha'"),
    ],
)
def test_a_config_of_another_kind_is_refused(copy: Path, changes: dict[str, Any], message: str) -> None:
    rewrite(copy, **changes)
    with pytest.raises(ValueError, match=message):
        load_bundle(copy)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, '{"schema_version": 2, "alpha": NaN}', '{"schema_version": 2}']
)
def test_a_config_that_is_none_is_refused(copy: Path, text: str) -> None:
    (copy / "router_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"router_config\.json: (expected|missing key)"):
        load_bundle(copy)


@pytest.mark.usefixtures("instant_export")
def test_a_bundle_of_a_subclass_with_more_to_say_is_refused(
    weighted_head: Callable[..., RouterHead], config: RouterConfig, tmp_path: Path
) -> None:
    @dataclasses.dataclass(frozen=True)
    class Extended(RouterConfig):
        threshold: float = 0.5

    extended = Extended(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    save_bundle(tmp_path, weighted_head("linear", feature_set="draft_only"), extended)
    with pytest.raises(ValueError, match="unknown key 'threshold'"):
        load_bundle(tmp_path)


@pytest.mark.parametrize(
    ("kind", "estimator", "losses"),
    [
        ("linear", "gap", ("log",)),
        ("trees", "gap", ("zero_one", "sampled", "log")),
        ("trees", "two_confidence", ("sampled",)),
        ("mlp", "cost_sensitive", ("sampled", "zero_one")),
    ],
)
def test_every_kind_comes_back_on_both_backends(
    kind: str,
    estimator: str,
    losses: tuple[str, ...],
    weighted_head: Callable[..., RouterHead],
    config: RouterConfig,
    tmp_path: Path,
) -> None:
    head = weighted_head(kind, estimator, "draft_only", losses=losses)
    if estimator == "gap":
        head.set_calibration(losses[0], torch.linspace(-1, 1, 7), torch.linspace(-0.5, 0.9, 7))
    stated = save_bundle(tmp_path, head, config)
    assert (stated.kind, stated.estimator, stated.losses, stated.int8) == (kind, estimator, losses, False)
    loaded = load_bundle(tmp_path)
    assert loaded.config == stated and loaded.head().spec == head.spec
    inputs = head.arrange(torch.randn(40, head.width), torch.Generator().manual_seed(0))
    for backend in ("onnx", "torch"):
        torch.testing.assert_close(loaded.runtime(backend)(*inputs), head(*inputs).detach(), rtol=0, atol=1e-5)
    for name, values in head.state_dict().items():
        assert torch.equal(values, loaded.head().state_dict()[name]), name


def test_columns_of_another_loss_are_refused(copy: Path) -> None:
    rewrite(copy, losses=["sampled", "zero_one"])
    with pytest.raises(ValueError, match=r"router\.onnx: expected losses 'sampled,zero_one', got 'zero_one,sampled'"):
        load_bundle(copy).runtime("onnx")


@pytest.mark.parametrize(("tolerance", "smaller"), [(0.5, True), (1e-9, False)])
def test_int8_weights_are_taken_where_they_change_little(
    tolerance: float, smaller: bool, weighted_head: Callable[..., RouterHead], config: RouterConfig, tmp_path: Path
) -> None:
    head = weighted_head()
    features = torch.randn(200, head.width, generator=torch.Generator().manual_seed(0))
    stated = save_bundle(tmp_path, head, config, int8_inputs=[features], int8_tolerance=tolerance)
    assert load_bundle(tmp_path).config == stated and stated.int8 == smaller
    moved = float((load_bundle(tmp_path).runtime("onnx")(features) - head(features).detach()).abs().max())
    if smaller:
        assert 1e-4 < moved <= tolerance
        assert stated.figures["int8_largest_difference"] == pytest.approx(moved, abs=2e-5)
        assert "int8 weights" in (tmp_path / "README.md").read_text()
    else:
        assert moved <= 1e-5 and "int8_largest_difference" not in stated.figures


def test_weights_of_another_head_are_refused(copy: Path, weighted_head: Callable[..., RouterHead]) -> None:
    rewrite(copy, hidden=[8, 8])
    with pytest.raises(ValueError, match=r"head\.safetensors: expected the weights of a mlp head"):
        load_bundle(copy).head()


def test_weights_that_are_no_numbers_are_refused(copy: Path) -> None:
    weights = safetensors.torch.load((copy / "head.safetensors").read_bytes())
    name = next(name for name in weights if name.endswith("weight"))
    weights[name].fill_(torch.nan)
    checked = load_bundle(copy)
    damaged = dataclasses.replace(checked, files={**checked.files, "head.safetensors": safetensors.torch.save(weights)})
    with pytest.raises(ValueError, match=rf"head\.safetensors: .*got NaN or infinity in '{name}'"):
        damaged.head()


def test_an_onnx_model_of_another_head_is_refused(copy: Path) -> None:
    rewrite(copy, estimator="gap")
    with pytest.raises(ValueError, match=r"router\.onnx: expected estimator 'gap', got 'two_confidence'"):
        load_bundle(copy).runtime("onnx")


def test_an_unknown_backend_is_refused(exported: Path) -> None:
    with pytest.raises(ValueError, match="backend: expected one of onnx, torch, got 'jax'"):
        load_bundle(exported).runtime("jax")


def test_nothing_is_pickled(exported: Path) -> None:
    for path in exported.iterdir():
        assert not path.read_bytes().startswith((b"\x80", b"PK")), f"{path.name} looks like a pickle or a torch archive"
    assert safetensors.torch.load_file(exported / "head.safetensors")


@pytest.mark.usefixtures("instant_export")
def test_an_interrupted_write_over_another_bundle_is_never_taken_for_a_whole_one(
    copy: Path, weighted_head: Callable[..., RouterHead], config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, done = bundle.os.replace, []

    def fail_at_second(source: Path, target: Path) -> None:
        if len(done) == 1:
            raise OSError("disk full")
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(bundle.os, "replace", fail_at_second)
    with pytest.raises(OSError, match="disk full"):
        save_bundle(copy, weighted_head(seed=3), config)
    assert {path.name for path in copy.iterdir()} == FILES, "no temporary file may stay behind"
    with pytest.raises(ValueError, match=r"router\.onnx: its content does not fit"):
        load_bundle(copy)


def test_the_card_is_worth_reading(exported: Path, config: RouterConfig) -> None:
    card = (exported / "README.md").read_text()
    header = card.split("---")[1]
    assert "library_name: speccascade" in header and "- tiny/drafter\n- tiny/verifier" in header
    for part in ("`tiny/drafter` drafts", "from_pretrained", "with_budget", "| 0.2 | 0.720 |", "random pairs"):
        assert part in card, part
    assert "0.700 (0.600 to 0.800)" in card and "| held_out_loss | 0.25 |\n| positions | 14387 |" in card


def test_the_card_keeps_folders_of_the_training_machine_to_itself(config: RouterConfig) -> None:
    local = dataclasses.replace(config, drafter="/home/someone/runs/drafter", calibration={}, figures={})
    card = bundle.render_card(local)
    assert "/home" not in card and "base_model" not in card and "with_budget" not in card


def test_a_long_calibration_is_thinned_in_the_card_alone(config: RouterConfig) -> None:
    rows = tuple(CalibrationRow(alpha=i / 40, deferral=0.1, rejection=0.1, quality=0.5) for i in range(41))
    card = bundle.render_card(dataclasses.replace(config, calibration={"greedy": rows}))
    assert "12 of 41 rows" in card and "| 0 | 0.500" in card and "| 1 | 0.500" in card
    assert card.count("| 0.500 |") == 12


@pytest.mark.usefixtures("instant_export")
def test_numbers_must_be_finite(config: RouterConfig, weighted_head: Callable[..., RouterHead], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="default_alpha: expected a finite number, got nan"):
        dataclasses.replace(config, default_alpha=float("nan"))
    with pytest.raises(ValueError, match="calibration quality: expected a finite number, got inf"):
        CalibrationRow(alpha=0.1, deferral=0.1, rejection=0.1, quality=float("inf"))
    with pytest.raises(ValueError, match="config: expected finite numbers"):
        save_bundle(tmp_path, weighted_head(), dataclasses.replace(config, figures={"loss": float("nan")}))
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_no_folder_and_no_hub_id_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match="expected a folder or a Hub id such as 'owner/name', got 'nothing'"):
        find_bundle("nothing")
    with pytest.raises(FileNotFoundError, match=r"'someone/router' is no folder here, and fetching it .* failed"):
        find_bundle("someone/router")
    with pytest.raises(FileNotFoundError, match="found none at '/nowhere/at/all'"):
        load_bundle("/nowhere/at/all")


def test_a_hub_id_is_fetched_and_nothing_but_the_bundle(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fetch(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(exported)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert find_bundle("someone/router", revision="v1") == exported
    assert calls[0][0] == "someone/router" and calls[0][1]["revision"] == "v1"
    assert set(calls[0][1]["allow_patterns"]) == FILES

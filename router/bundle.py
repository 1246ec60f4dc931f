"""A router on disk: ``router.onnx``, ``head.safetensors``, ``router_config.json`` and ``README.md`` in one folder.

Nothing in it is code: no pickle, no custom operator, no tensor outside the ONNX file. The config names a digest of each
file, and loading compares them before any parser sees the content.
"""

import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import safetensors.torch
from torch import Tensor

from .. import __version__
from .card import render_card
from .checks import check_choice
from .config import RouterConfig, explain_alpha
from .export import OPSET, check_finite, export_onnx
from .features import FEATURE_SETS, schema_digest
from .head_base import Signature
from .heads import Head, build_head
from .quantise import quantise
from .runtime import BACKENDS, HeadRuntime, OnnxHead, TorchHead

__all__ = ["Bundle", "bundle_digest", "find_bundle", "load_bundle", "save_bundle", "write_bundle"]

ONNX_FILE, WEIGHTS_FILE, CONFIG_FILE, CARD_FILE = "router.onnx", "head.safetensors", "router_config.json", "README.md"


@dataclass(frozen=True, repr=False)
class Bundle:
    """A bundle in memory, its files exactly as they were checked."""

    config: RouterConfig
    files: Mapping[str, bytes]

    def head(self) -> Head:
        """Rebuild the torch head.

        Raises:
            ValueError: the weights do not fit the head that the config describes, or are not finite.
        """
        head = build_head(self.config.head_spec)
        try:
            head.load_state_dict(safetensors.torch.load(self.files[WEIGHTS_FILE]))
        except Exception as error:  # safetensors and torch each raise their own class for a bad file
            reason = " ".join(str(error).split())
            raise ValueError(f"{WEIGHTS_FILE}: expected the weights of a {head.kind} head: {reason}") from error
        try:
            check_finite(head)
        except ValueError as error:
            raise ValueError(f"{WEIGHTS_FILE}: {error}") from error
        return head.eval()

    def runtime(self, backend: str = "onnx") -> HeadRuntime:
        """Make the head callable: ``onnx`` on one CPU thread, ``torch`` on the device of its input.

        Raises:
            ValueError: an unknown backend, or a model that is not the one that the config describes.
        """
        check_choice("backend", backend, BACKENDS)
        if backend == "torch":
            return TorchHead(self.head())
        runtime = OnnxHead(self.files[ONNX_FILE])
        config, spec = self.config, self.config.head_spec
        stated = {"feature_schema": config.feature_schema, "kind": spec.kind, "estimator": spec.estimator}
        for key, value in (stated | {"losses": ",".join(spec.losses)}).items():
            if runtime.metadata.get(key) != value:
                raise ValueError(f"{ONNX_FILE}: expected {key} {value!r}, got {runtime.metadata.get(key)!r}")
        expected = build_head(spec).signature
        if _fixed(runtime.signature) != _fixed(expected):
            raise ValueError(f"{ONNX_FILE}: expected {expected}, got {runtime.signature}")
        return runtime


def save_bundle(
    directory: str | os.PathLike[str],
    head: Head,
    config: RouterConfig,
    int8_inputs: Sequence[Tensor] | None = None,
    int8_tolerance: float = 0.01,
) -> RouterConfig:
    """Export ``head`` and write its bundle; return the config as written, with what the head and the code know.

    The config goes last, so that an interrupted write leaves a folder that ``load_bundle`` refuses, never a mixture
    that it takes.

    Args:
        directory: folder for the bundle.
        head: a trained head.
        config: what the trainer knows about it.
        int8_inputs: the head's inputs on held-out positions; if given, its ONNX file gets int8 weights, provided that
            no gap there moves by more than the tolerance, and the config says ``int8`` and by how much they moved.
            Where they would move more, it stays float32.
        int8_tolerance: largest such move.

    Raises:
        ValueError: ONNX and torch differ by more than 1e-5, or a number is not finite.
    """
    with tempfile.TemporaryDirectory() as scratch:
        exported = Path(scratch) / ONNX_FILE
        export_onnx(head, exported)
        onnx_content = exported.read_bytes()
    smaller = None if int8_inputs is None else quantise(onnx_content, int8_inputs, int8_tolerance)
    if smaller is not None:
        onnx_content, moved = smaller
        config = replace(config, figures={**config.figures, "int8_largest_difference": moved})
    weights = {name: _stored(values) for name, values in head.state_dict().items()}
    files = {ONNX_FILE: onnx_content, WEIGHTS_FILE: safetensors.torch.save(weights)}
    complete = replace(
        config,
        **asdict(head.spec),
        alpha_meaning=explain_alpha(head.spec),
        features=FEATURE_SETS[head.feature_set],
        feature_schema=schema_digest(head.feature_set),
        opset=OPSET,
        int8=smaller is not None,
        versions=_versions(),
        files={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    )
    write_bundle(directory, Bundle(complete, files))
    return complete


def write_bundle(directory: str | os.PathLike[str], bundle: Bundle) -> None:
    """Write a bundle's files, each under a temporary name first and the config last."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    config = bundle.config.to_json().encode()
    card = render_card(bundle.config).encode()
    for name, content in {**bundle.files, CARD_FILE: card, CONFIG_FILE: config}.items():
        temporary = target / f".{name}.{os.getpid()}.tmp"
        try:
            temporary.write_bytes(content)
            os.replace(temporary, target / name)
        finally:
            temporary.unlink(missing_ok=True)


def load_bundle(directory: str | os.PathLike[str]) -> Bundle:
    """Read and check a bundle; nothing is parsed whose digest does not fit.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: the config is of another schema, a file was changed, or the features mean something else here.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise FileNotFoundError(f"router: expected a folder with {CONFIG_FILE}, found none at {str(directory)!r}")
    config = RouterConfig.from_json(_read(folder, CONFIG_FILE).decode("utf-8", errors="replace"))
    expected = {ONNX_FILE, WEIGHTS_FILE}
    if set(config.files) != expected:
        raise ValueError(f"{CONFIG_FILE}: expected digests of {sorted(expected)}, got {sorted(config.files)}")
    files = {}
    for name, digest in config.files.items():
        content = _read(folder, name)
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"{name}: its content does not fit the digest in {CONFIG_FILE}: changed or damaged")
        files[name] = content
    build_head(config.head_spec)
    config.check_features()
    return Bundle(config, files)


def bundle_digest(name: str | os.PathLike[str]) -> str:
    """SHA-256 of a bundle's config, which holds the digests of all its files: tells two bundles of one name apart.

    Raises:
        FileNotFoundError: no such bundle.
    """
    return hashlib.sha256((find_bundle(name) / CONFIG_FILE).read_bytes()).hexdigest()


def find_bundle(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the folder of a bundle: a directory as it is, a Hub id downloaded by ``huggingface_hub``.

    Raises:
        FileNotFoundError: neither a directory nor a Hub id that could be fetched.
    """
    path = Path(name)
    if path.is_dir():
        return path
    identifier = os.fspath(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", identifier):
        raise FileNotFoundError(f"router: expected a folder or a Hub id such as 'owner/name', got {identifier!r}")
    from huggingface_hub import snapshot_download  # not needed for a folder, and slow to import

    wanted = [ONNX_FILE, WEIGHTS_FILE, CONFIG_FILE, CARD_FILE]
    try:
        return Path(snapshot_download(identifier, revision=revision, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # its errors are OSErrors, a malformed id a ValueError
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"router: {identifier!r} is no folder here, and fetching it from the Hub failed: {reason}"
        ) from error


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{name}: missing from the router at {str(folder)!r}")
    return path.read_bytes()


def _stored(values: Tensor) -> Tensor:
    values = values.detach().cpu().contiguous()
    return values.float() if values.is_floating_point() else values


def _fixed(signature: Signature) -> list[list[tuple[str, list[int | None]]]]:
    """A signature without the names of its free axes, which exporters choose as they like."""
    return [
        [(name, [axis if isinstance(axis, int) else None for axis in shape]) for name, shape in values.items()]
        for values in signature
    ]


def _versions() -> dict[str, str]:
    libraries = {name: version(name) for name in ("torch", "onnx", "onnxruntime", "numpy")}
    return {"speccascade": __version__, "python": platform.python_version()} | libraries

"""``speccascade export``: a trained head as a router bundle."""

from __future__ import annotations

from .options import CommandLine, write_config

__all__ = ["run"]

DESCRIPTION = """\
Turn the checkpoint of a training run into a router bundle: the head as ONNX with its normalisation inside, checked
against torch to 1e-5; a calibration table from α to deferral, rejection and quality with intervals; the models and
vocabulary it belongs to; and a card. `speccascade train` ends with this; use it for another checkpoint, α or split."""

EXAMPLE = """\
  speccascade export --checkpoint runs/demo --out runs/demo/router
  speccascade export --checkpoint runs/mine/checkpoints/best.ckpt --out runs/mine/router --alpha 0.2"""


def run(arguments: list[str]) -> None:
    """Parse the arguments and export."""
    from ..training.export import ExportConfig, export_router

    config = CommandLine("export", ExportConfig, DESCRIPTION, EXAMPLE).parse(arguments)
    write_config(config, export_router(config))

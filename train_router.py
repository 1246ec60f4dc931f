"""Train a router: ``python train_router.py --config configs/train/demo.yaml``, the same as ``speccascade train``."""

import sys

from speccascade.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))

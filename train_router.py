"""Train a router on traces: ``python train_router.py --config configs/train/demo.yaml``, as ``speccascade train`` does."""

import sys

from speccascade.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))

"""A small table with everything that a table can have."""

from torch_dcl.experiments.paper_numbers import TABLE1

CONTENT = {
    "title": "Table 1 <made up> & small",
    "cells": [
        {
            "set": name,
            "column": column,
            "errors": [center - 0.1, center, center + 0.13],
            "seeds": [0, 1, 2],
            "paper": TABLE1[name][column].mean if column in TABLE1[name] else None,
            "paper_std": TABLE1[name][column].std if column in TABLE1[name] else None,
            "weights": 475500 if column == "baseline" else 335500,
            "train_loss": [0.1, 0.11, 0.12],
            "test_loss": [0.2 + center, 0.21 + center, 0.22 + center],
            "stopped": [],
            "fitted": column == "baseline",
        }
        for name in ("MNIST-II-01", "MNIST-III-10")
        for column, center in (
            ("baseline", 2.0), ("A2", 1.5), ("A3S", 1.4), ("A3D", 1.6), ("B2", 2.4), ("low-rank", 1.7),
        )
    ],
    "protocol": {"epochs <b>": "24 & no more", "batch": 100},
    "hardware": "one <fast> GPU",
    "versions": {"torch": "2.10"},
    "minutes": {"data": 2, "training": 40.5},
    "command": "dcl run table1 --out 'a & b'",
    "deviations": ["Layouts <i>anew</i>, since figure 2 | is a picture."],
}  # fmt: skip

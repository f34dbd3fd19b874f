"""Recipes of torchtitan for each mesh dimension, written out in plain torch: its own trainer needs a GPU.

Every script names the files of torchtitan 0.2.2 (https://github.com/pytorch/torchtitan/tree/v0.2.2) that it
follows. The model, its weights, the data and the layout come from wanma's job file.
"""

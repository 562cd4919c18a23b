"""Parts of ``bench_layer.py``: shapes and routings, implementations, how they are checked, timed and reported."""

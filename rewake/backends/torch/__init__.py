"""PyTorch: transformers supplies the models, torch the matrix products, `kernels` the attention over coded pages."""

import os

# GNU OpenMP's threads spin while they wait for each other. If another process takes one of the cores, each of the
# hundreds of parallel regions of a step then waits for that core's time slice: a step takes 5 to 50 times as long.
# Spinning for some microseconds only costs nothing when the cores are free. Read when torch loads the library, so it
# stands before torch's import.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# For models that transformers runs. oneDNN keeps what it has made for a product of a certain shape, and every number of
# rows is a shape: 1,024 of them, twice (in torch's own cache, too), grow to hundreds of megabytes over the first
# thousands of requests. Those of all numbers of sequences that decode together fit into this many.
for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(name, "128")

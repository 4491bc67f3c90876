"""Prints one host's rows of some batches. tests.processes.batches_on_hosts runs it on each."""

import json
import sys

import jax
import numpy as np

from data.huggingface import HuggingFaceConfig
from data.loader import BatchSpec, FlatTokensConfig
from runtime.devices import make_mesh


def main():
    request = json.loads(sys.argv[1])
    jax.distributed.initialize()
    config, shape, host = request["config"], request["shape"], jax.process_index()
    with jax.set_mesh(make_mesh(request["mesh"])):
        kind = FlatTokensConfig if "filespec" in config else HuggingFaceConfig
        source = kind(**config)
        loader = source.open(BatchSpec(*shape, start_token=0, io_threads=2), "train")
        loader.position = request.get("positions", {}).get(str(host))
        rows = []
        for _, batch in loader.from_step(*request["steps"]):
            parts = {p.index[0].indices(shape[0])[0]: p for p in batch.targets.addressable_shards}
            rows.append({first: np.asarray(part.data).tolist() for first, part in parts.items()})
    print(json.dumps({"host": host, "rows": rows, "position": loader.position}))


if __name__ == "__main__":
    main()

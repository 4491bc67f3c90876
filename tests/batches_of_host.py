"""What one of several hosts holds of some batches. `tests.helpers.batches_on_hosts` runs it."""

import json
import sys

import jax
import numpy as np

from data.huggingface import HuggingFaceConfig
from data.loader import BatchSpec, FlatTokensConfig
from shardlib.devices import make_mesh


def main():
    asked = json.loads(sys.argv[1])
    jax.distributed.initialize()
    config, shape, host = asked["config"], asked["shape"], jax.process_index()
    with jax.set_mesh(make_mesh(asked["mesh"])):
        section = FlatTokensConfig if "filespec" in config else HuggingFaceConfig
        loader = section(**config).open(BatchSpec(*shape, start_token=0, io_threads=2), "train")
        loader.position = asked.get("positions", {}).get(str(host))
        held = [
            {
                part.index[0].indices(shape[0])[0]: np.asarray(part.data).tolist()
                for part in batch.targets.addressable_shards
            }
            for _, batch in loader.from_step(*asked["steps"])
        ]
    print(json.dumps({"host": host, "rows": held, "position": loader.position}))


if __name__ == "__main__":
    main()

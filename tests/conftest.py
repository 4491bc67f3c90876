"""All tests run on 8 simulated CPU devices; the flags must be set before JAX is first used."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

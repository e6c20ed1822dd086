"""Set before anything imports torch: see quire.engine.startup.model_environment."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

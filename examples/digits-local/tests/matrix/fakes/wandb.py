"""A stand-in for W&B that hangs or raises, as FAKE_WANDB says: a tracker must never hold training up."""

import os
import time
from typing import Any


def init(**_options: Any) -> Any:
    if os.environ["FAKE_WANDB"] == "hang":
        time.sleep(1_000_000)
    raise RuntimeError("the service is not there")

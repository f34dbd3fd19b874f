"""A module that does what a fork does not survive: it starts a thread when imported."""

import threading
import time

threading.Thread(target=time.sleep, args=(600,), daemon=True, name="impatient").start()

"""Child processes: forked where no other thread runs, else new interpreters, and gone with their parents."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from wanma.elastic.workers.linux_processes import process_state

PROGRAM = """
import json, os, signal, sys, threading
from wanma.job.run.child_process import ChildProcess

def serve(requests, answer):
    for request in requests:
        if request["do"] == "end":
            os._exit(3)
        if request["do"] == "fail":
            raise ValueError("a fault of the child")
        print("text of a library")
        is_reset = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        answer({"pid": os.getpid(), "kept": kept, "is_reset": is_reset})

kept = ["an object of the parent"]
signal.signal(signal.SIGTERM, lambda *_: None)

def child():
    return ChildProcess(serve, "no.such.module")

for do, code in (("end", 3), ("fail", 1)):
    one = child()
    one.send({"do": do})
    assert next(one.answers(), None) is None
    assert one.wait() == code
    one.send({"do": "answer"})  # lost
    one.close()
waiter = threading.Event()
thread = threading.Thread(target=waiter.wait)
thread.start()
interpreter = child()
assert (next(interpreter.answers(), None), interpreter.wait()) == (None, 1), "it has no such module"
interpreter.close()
waiter.set()
thread.join()
forked = [child(), child()]
for one in forked:
    one.send({"do": "answer"})
print(json.dumps([next(one.answers()) for one in forked]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_has_the_objects_of_its_parent_and_ends_with_it() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert ran.returncode == -9, ran.stderr
    found = json.loads(ran.stdout)
    assert [(one["kept"], one["is_reset"]) for one in found] == [(["an object of the parent"], True)] * 2
    assert "ValueError: a fault of the child" in ran.stderr
    deadline = time.monotonic() + 30
    for one in found:
        while process_state(one["pid"]) not in ("gone", "dead") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process_state(one["pid"]) in ("gone", "dead")

"""The gate of continuous integration: tests on a clean start, failures repeated alone, evidence that stays.

python tests/support/gate/machine.py             # what this run runs on
python tests/support/gate/scratch.py clean       # before it: what earlier runs left goes
python tests/support/gate/scratch.py run WORDS   # a command whose caches and temporary files are its own
python -m support.gate                           # the tests, with a verdict: make test-ci
"""

"""Cases from the command line: `python -m support.generated --seed 1 --count 200`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from support.generated.case import Case, source
from support.generated.generate import combinations, single_features
from support.generated.judge import judging
from support.generated.shrink import shrink
from support.generated.survey import line, read


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--single", action="store_true", help="each feature by itself, in every layout")
    parser.add_argument("--count", type=int, default=0, help="combinations")
    parser.add_argument("--seed", type=int, default=1, help="of the combinations")
    parser.add_argument("--match", default="", help="only cases whose text has this in it")
    parser.add_argument("--without", default="", help="leave out cases that have one of these, by commas")
    parser.add_argument("--every", type=int, default=1, help="only each so manieth")
    parser.add_argument("--share", default="0/1", help="of several processes: this one's number / how many")
    parser.add_argument("--log", type=Path, help="verdicts go there, a line of JSON each")
    parser.add_argument(
        "--table", type=Path, nargs="+", help="such files: tables of docs/reference/module-features.md"
    )
    parser.add_argument("--case", help="one case: 'Case(...)'")
    parser.add_argument("--source", action="store_true", help="print its program")
    parser.add_argument("--no-shrink", action="store_true")
    given = parser.parse_args()
    if given.table:
        found = read(text for path in given.table for text in path.read_text().splitlines())
        print(found.counts_table(), found.features_table(), sep="\n\n")
        return 0
    cases = [*(single_features() if given.single else ()), *combinations(given.seed, given.count)]
    if given.case:
        cases = [eval(given.case, {"Case": Case})]
    left_out = [name for name in given.without.split(",") if name]
    cases = [
        case
        for case in cases
        if given.match in str(case) and not any(f"'{name}'" in str(case) for name in left_out)
    ][:: given.every]
    share, shares = map(int, given.share.split("/"))
    cases = cases[share::shares]
    if given.source:
        print(source(cases[0]))
        return 0
    counts: Counter[str] = Counter()
    began = time.monotonic()
    with judging() as judge:
        for case in cases:
            verdict = judge(case)
            counts[verdict.kind] += 1
            if verdict.kind == "wrong" and not given.no_shrink:
                smallest = shrink(case, lambda other: judge(other).kind == "wrong")
                print(
                    f"wrong: {case}\n    {verdict.text[-1500:]}\n"
                    f"smallest: {smallest}\n    {judge(smallest).text[-1500:]}",
                    flush=True,
                )
            elif given.case:
                print(verdict.kind, verdict.difference, verdict.text)
            if given.log:
                with given.log.open("a") as log:
                    log.write(line(case, verdict) + "\n")
    print(dict(counts), f"{len(cases)} cases in {time.monotonic() - began:.0f} s")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

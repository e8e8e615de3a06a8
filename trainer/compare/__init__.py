"""Arms of one job, measured in turns, with a verdict that can say "inconclusive".

The statistics stand by themselves: a test or a notebook compares any two callables with

    from trainer.compare import compare

    print(compare(lambda: x.softmax(-1), lambda: fused(x)).sentence("fused", "softmax"))

or brings its own blocks to `take_turns`, or its own times to `paired_ratio`. Imports no torch.
"""

from trainer.compare.statistics import CONFIDENCE, Estimate, Verdict, estimate, log_ratios, paired_ratio
from trainer.compare.turns import Budget, Contestant, ContestantFailed, Pair, Turns, compare, take_turns

__all__ = [
    "CONFIDENCE",
    "Budget",
    "Contestant",
    "ContestantFailed",
    "Estimate",
    "Pair",
    "Turns",
    "Verdict",
    "compare",
    "estimate",
    "log_ratios",
    "paired_ratio",
    "take_turns",
]

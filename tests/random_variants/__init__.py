"""Random variants: `cases` draws them by Hypothesis, `check` checks one, `running` has the options of pytest.

grammar, scores, captures -> cases     masks, score functions, values of captures; whole cases
terms -> tracing                       the Python of a case, and the spec that the language traces from it
definitions -> meaning -> standard     the reference: named variants, operations, attention and its gradients
covers -> predicates                   what the analysis proves about tiles, beside brute force
samples, serving, varlen, sharded      inputs and calls of each kind, beside the reference
judging -> check                       the rule that decides
"""

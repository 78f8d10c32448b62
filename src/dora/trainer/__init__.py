"""The trainer: from scored samples to the next version of the policy.

`recipe` names algorithms and refuses bad combinations, `advantage`, `scoring` and `packing` are
pure, `loss`, `preference` and `corrections` are plain torch, `objective` picks a loss by name, `policy`
computes log-probs of responses, `optimizer` holds parameters in one flat buffer, `trainer` sums
gradients and takes the step, `tally` has its metrics.
"""

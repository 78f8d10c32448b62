"""The trainer: from scored samples to the next version of the policy.

`recipe` names algorithms and refuses bad combinations, `advantage` and `scoring` are pure, `loss`,
`preference` and `corrections` are plain torch, `objective` picks a loss by name, `packing` lays sequences end
to end, `policy` computes their log-probs, `critic` values, `gradient` one micro-batch, `optimizer` holds
parameters in one flat buffer, `trainer` takes the step, `updates` divides it, `tally` has its metrics.
"""

"""The trainer: from scored samples to the next version of the policy's weights.

`recipe` names the algorithms. `advantage`, `loss` and `corrections` are their mathematics, `packing` lays out
batches, `policy` and `critic` are the models, `learner` and `distributed` run them on one process or several,
and `trainer` takes the step.
"""

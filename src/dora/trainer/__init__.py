"""The trainer: from scored samples to the next version of the policy.

`advantage` and `packing` are pure, `loss` is plain torch, `policy` computes log-probs of
responses, `optimizer` holds parameters in one flat buffer, `trainer` takes the step.
"""

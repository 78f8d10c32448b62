"""Inference engines of others that DORA comes with: the backend layer of AsyncFlow.

Each keeps the contract of `dora.contract.inference`; `engine.adapter` chooses one by its name.
"""

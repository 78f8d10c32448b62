"""The tables of DORA's and AsyncFlow's papers, forecast by the production orchestrator in virtual time.

`published` has what the papers print, `fit` finds what DORA's paper leaves out, `tables` forecasts the rows.
"""

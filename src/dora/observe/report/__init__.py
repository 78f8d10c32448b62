"""`dora report`: what happened in one run or several, as one HTML page that needs nothing else.

Python reads a run's files into one JSON-able dict; the page's own script draws it. The same page is
served by `dora dash` while a run goes.
"""

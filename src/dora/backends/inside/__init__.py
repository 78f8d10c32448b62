"""What runs inside other systems' processes, with their interpreter and their packages.

This folder is on their path, so that nothing else of DORA is: its modules import no other of DORA's.
"""

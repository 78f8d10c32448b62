"""Control of a running run: requests, administration, status, evaluation, and its automatic stop."""

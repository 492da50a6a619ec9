"""Questions about a job, each a function from options to a report.

Commands and the Python interface (`stagec.job`, docs/python.md) call these and nothing else.
"""

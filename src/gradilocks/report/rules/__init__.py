"""The rules by which a run is judged: a Track enters, Findings leave.

Each threshold is a constant with its reason. A rule must stay silent on a healthy run, so each asks
for more than chance or a usual model can give.
"""

"""Where a job runs. `base.Engine` is the small interface; `local.LocalEngine` runs on this machine.

An engine places the supervisors of a run on machines and tells how they fare; what happens on
each machine belongs to the elastic room.
"""

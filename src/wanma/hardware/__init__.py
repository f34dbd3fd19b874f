"""Description of hardware: the device catalogue, discovery of this node without torch, and the doctor.

Nothing here starts processes of a run or decides how a job is laid out; it only reports what exists.
"""

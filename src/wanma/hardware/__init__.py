"""What machine this is: the catalogue of device kinds, discovery without torch, and the doctor.

Nothing here starts processes of a run or decides how a job is laid out; it only says what is there.
"""

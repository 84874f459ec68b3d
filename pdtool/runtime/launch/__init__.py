"""The processes of a run: started, watched and ended together.

Other folders use `launcher`; the emulator also uses `worker_main` and `diagnosis`.
"""

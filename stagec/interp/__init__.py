"""The numeric reference: runs programs on one device, or on all ranks of a small mesh in
lockstep."""

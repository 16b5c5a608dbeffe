"""What tests share. In each process that uses it torch compiles nothing of bitsandbytes."""

from tests.support.after_import import after_import, leave_bitsandbytes_as_it_is

after_import("torch", leave_bitsandbytes_as_it_is)

"""The disk: durable writes, locks, pools of descriptors, and the properties of disks."""

__all__ = ["durable", "file_lock", "files", "folder_lock", "folders", "leases", "readers"]

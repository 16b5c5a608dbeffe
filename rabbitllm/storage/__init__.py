"""The disk: durable writes, locks, pools of descriptors, and the properties of disks."""

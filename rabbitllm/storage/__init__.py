"""The disk: durable writes, locks, few descriptors, facts about disks."""

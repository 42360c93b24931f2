"""The archive of topics' logs in an object store.

`store` is the object store, `topic_archive` uploads the segments of one log and commits manifests,
and `cache` has local copies of segments that are read back. They know segments as files and
nothing of topics' delivery. nsparq.storage.manifest has the format of manifests.
"""

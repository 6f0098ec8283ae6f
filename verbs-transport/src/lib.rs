//! Messages between hosts over plain RDMA verbs.

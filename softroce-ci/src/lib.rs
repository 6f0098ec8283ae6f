//! Makes a host with a Soft-RoCE device.

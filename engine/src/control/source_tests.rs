//! The order of the checks: each request is wrong in two ways, and the first in order is the answer.

use super::*;
use crate::{
    Notification, Permission,
    budget::{Budget, Used},
    deadline::Deadline,
    memory::{Patience, RegisteredMemory},
};
use std::time::Duration;

const EPOCH: Epoch = Epoch::from_bytes([1; 16]);
const OTHER: Epoch = Epoch::from_bytes([2; 16]);

fn source() -> Source {
    let ranges = Budget::new(("max_registrations", 8), ("max_registered_bytes", 1 << 20));
    Source {
        epoch: EPOCH,
        registry: Registry::new(1, 8, ranges),
        admission: Arc::default(),
        inbox: Inbox::new(Budget::new(("max_notifications", 2), ("max_inbox_bytes", 100))),
        max_payload_bytes: 1000,
        max_notification_bytes: 50,
        serve_direct: ServeDirect::Never,
        has_device: false,
        about: About::default(),
    }
}

fn register(source: &Source, length: usize, permission: Permission) -> RegisteredMemory {
    let memory = Arc::new(crate::HostMemory::new(vec![0; length].into()));
    source.registry.register(&[(memory, 0, length as u64)], permission).expect("room").remove(0)
}

fn request(opcode: Opcode, epoch: Epoch, region: u64, offset: u64, length: u64) -> Request {
    Request { opcode, epoch, region, offset, length, profile: Profile::Staged }
}

fn answer(source: &Source, request: &Request) -> Option<Status> {
    source.admit(request).err()
}

#[test]
fn the_first_check_that_fails_is_the_answer() {
    let source = source();
    let read_only = register(&source, 2000, Permission::RemoteRead).id();
    let write_only = register(&source, 2000, Permission::RemoteWrite).id();
    let local = register(&source, 2000, Permission::LocalOnly).id();
    for opcode in [Opcode::Read, Opcode::Write] {
        let (right, wrong) = if opcode == Opcode::Read { (read_only, write_only) } else { (write_only, read_only) };
        let ask = |epoch, region, offset, length| answer(&source, &request(opcode, epoch, region, offset, length));
        assert_eq!(ask(OTHER, 99, 0, 1), Some(Status::EpochMismatch), "before the region");
        assert_eq!(ask(EPOCH, 99, 0, 1), Some(Status::UnknownRegion));
        assert_eq!(ask(EPOCH, 0, 0, 1), Some(Status::UnknownRegion));
        assert_eq!(ask(EPOCH, wrong, 1999, 2), Some(Status::PermissionDenied), "before the range");
        assert_eq!(ask(EPOCH, local, 0, 1), Some(Status::PermissionDenied));
        assert_eq!(ask(EPOCH, right, 1999, 2), Some(Status::InvalidRange));
        assert_eq!(ask(EPOCH, right, 1000, 1001), Some(Status::InvalidRange), "before the budget");
        assert_eq!(ask(EPOCH, right, u64::MAX, 2), Some(Status::InvalidRange), "no overflow");
        assert_eq!(ask(EPOCH, right, 0, 1001), Some(Status::Exhausted), "one above the payload limit");
        for length in [0, 1, 999, 1000] {
            assert_eq!(ask(EPOCH, right, 0, length), None);
        }
        assert_eq!(ask(EPOCH, right, 2000, 0), None, "nothing, at the end");
    }
    for opcode in [Opcode::RdmaRead, Opcode::RdmaWrite, Opcode::SlicedRdmaRead, Opcode::SlicedRdmaWrite] {
        assert_eq!(answer(&source, &request(opcode, OTHER, read_only, 0, 1)), Some(Status::EpochMismatch));
        assert_eq!(answer(&source, &request(opcode, EPOCH, read_only, 0, 1)), Some(Status::BackendUnavailable));
    }
    assert_eq!(source.admission.inside(), 0, "whoever was refused or dropped has left");
    source.admission.close(Deadline::after(Duration::ZERO)).expect("nobody is inside");
    for opcode in [Opcode::Describe, Opcode::Read, Opcode::Write, Opcode::Notify, Opcode::RdmaRead] {
        assert_eq!(answer(&source, &request(opcode, OTHER, 0, 0, 0)), Some(Status::SourceClosed), "before the epoch");
    }
}

#[test]
fn a_direct_request_is_for_a_source_that_serves_them() {
    let direct =
        |opcode, region, offset| Request { profile: Profile::Direct, ..request(opcode, EPOCH, region, offset, 8) };
    for (serves, reads, writes) in
        [(ServeDirect::Never, false, false), (ServeDirect::Reads, true, false), (ServeDirect::All, true, true)]
    {
        let source = Source { serve_direct: serves, has_device: true, ..source() };
        let (both, read_only) =
            (register(&source, 8, Permission::RemoteReadWrite).id(), register(&source, 8, Permission::RemoteRead).id());
        for (opcode, served) in
            [(Opcode::Read, reads), (Opcode::Write, writes), (Opcode::RdmaRead, reads), (Opcode::RdmaWrite, writes)]
        {
            let refused = (!served).then_some(Status::DirectRefused);
            assert_eq!(answer(&source, &direct(opcode, both, 0)), refused, "{serves:?} {opcode:?}");
            let beyond = refused.or(Some(Status::InvalidRange));
            assert_eq!(answer(&source, &direct(opcode, both, 1)), beyond, "before the range");
            assert_eq!(answer(&source, &request(opcode, EPOCH, both, 0, 8)), None, "staged, as ever");
        }
        for opcode in [Opcode::SlicedRdmaRead, Opcode::SlicedRdmaWrite] {
            assert_eq!(answer(&source, &direct(opcode, both, 0)), Some(Status::DirectRefused), "over one pair only");
            assert_eq!(answer(&source, &request(opcode, EPOCH, both, 0, 8)), None, "staged");
        }
        assert_eq!(answer(&source, &direct(Opcode::Write, read_only, 0)), Some(Status::PermissionDenied));
    }
}

#[test]
fn a_notification_takes_its_room_before_it_is_told_to_come() {
    let source = source();
    let ask = |name, message| source.admit(&request(Opcode::Notify, EPOCH, 0, name, message));
    assert_eq!(ask(25, 26).err(), Some(Status::Exhausted), "one above the limit of one");
    assert_eq!(ask(u64::MAX, 1).err(), Some(Status::Exhausted), "no overflow");
    let first = ask(25, 25).expect("at the limit of one");
    let second = ask(0, 0).expect("empty");
    assert_eq!(source.inbox.retained(), Used { count: 2, bytes: 50 });
    assert_eq!(ask(0, 0).err(), Some(Status::Exhausted), "an empty one needs room, too");
    drop(first);
    let Kind::Notify { room, name_bytes: 0, message_bytes: 0 } = second.kind else { panic!("a notification") };
    room.commit(Notification::default());
    assert_eq!((source.inbox.queued(), source.inbox.retained()), (1, Used { count: 1, bytes: 0 }));
}

#[test]
fn an_admitted_operation_keeps_its_memory_whatever_is_given_up() {
    let source = source();
    let handle = register(&source, 100, Permission::RemoteReadWrite);
    let operation = source.admit(&request(Opcode::Write, EPOCH, handle.id(), 10, 20)).expect("admitted");
    assert_eq!(source.registry.unregister(&handle), Ok(true));
    drop(handle);
    let late = request(Opcode::Write, EPOCH, 1, 10, 20);
    assert_eq!(answer(&source, &late), Some(Status::UnknownRegion));
    let Kind::Write(access) = &operation.kind else { panic!("a WRITE") };
    let touched = access.registration.write(access.place(), Patience::None, |bytes| bytes.fill(1));
    assert_eq!(touched, Ok(()));
    let closing = source.admission.close(Deadline::after(Duration::ZERO)).expect_err("one is inside");
    assert_eq!(closing.inside, 1);
    drop(operation);
    assert_eq!(source.admission.close(Deadline::after(Duration::ZERO)), Ok(()));
}

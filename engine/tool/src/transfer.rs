//! `read` and `write`: ranges of any length, in requests of one chunk, some of which are one submission.

use std::{
    cell::Cell,
    fs::File,
    io::{self, Read as _, Write as _},
    time::Instant,
};

use verbs_engine::{
    Direction, Mode, Notification, Permission, Profile, RegisteredMemory, RemoteEffect, TransferRequest, Transport,
};

use crate::{
    Failure,
    args::{Read, Write},
    index::Entry,
    output::Output,
    remote::Session,
};

/// Requests of one submission: the next one waits until all are through, and their bytes are stored.
const AT_ONCE: u64 = 4;

/// A stretch of what a source serves, and local memory for a submission's worth of it.
struct Stretch<'a> {
    session: &'a Session,
    address: u64,
    length: u64,
    chunk: u64,
    local: RegisteredMemory,
    /// What has moved its bytes so far.
    transport: Cell<Option<Transport>>,
}

impl<'a> Stretch<'a> {
    fn new(session: &'a Session, entry: &Entry, offset: u64, length: u64, chunk: u64) -> Result<Self, Failure> {
        let end = offset.checked_add(length).filter(|end| *end <= entry.length);
        if end.is_none() {
            let (name, has) = (&entry.name, entry.length);
            return Err(format!("{name:?} has {has} bytes; {length} from {offset} are not all within").into());
        }
        let room = length.min(chunk * AT_ONCE).max(1);
        let local = session.engine.register_memory(vec![0; usize::try_from(room)?].into(), Permission::LocalOnly)?;
        Ok(Self { session, address: entry.address + offset, length, chunk, local, transport: Cell::new(None) })
    }

    /// Offset and length of each submission.
    fn parts(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let (length, step) = (self.length, self.local.len());
        (0..length.div_ceil(step)).map(move |part| (part * step, step.min(length - part * step)))
    }

    fn over(&self) -> String {
        self.transport.get().map_or("nothing".to_owned(), |transport| transport.to_string())
    }

    fn submit(&self, mode: Mode, at: u64, length: u64) -> Result<(), Failure> {
        let request = |chunk: u64| TransferRequest {
            local_address: self.local.address() + chunk * self.chunk,
            remote_address: self.address + at + chunk * self.chunk,
            length: self.chunk.min(length - chunk * self.chunk),
        };
        let requests: Vec<_> = (0..length.div_ceil(self.chunk)).map(request).collect();
        let Session { engine, source, .. } = self.session;
        let report = engine.submit_and_wait(source, mode, &requests, self.session.left())?;
        let (moved, report_profile) = (at + report.completed_bytes, report.profile);
        let (before, now) = (self.transport.get(), report.transport);
        let mixed = before.is_some() && now.is_some() && before != now;
        self.transport.set(if mixed { Some(Transport::Mixed) } else { now.or(before) });
        report.into_result().map(drop).map_err(|failure| {
            let doubt = match (failure.effect, report_profile) {
                (RemoteEffect::Unknown, Profile::Direct) => "; the bytes behind may have changed in part at the source",
                (RemoteEffect::Unknown, _) => "; the bytes behind may or may not have changed at the source",
                _ => "",
            };
            format!("after {moved} bytes: {}{doubt}", failure.error).into()
        })
    }
}

fn mode(direction: Direction, direct: bool) -> Mode {
    if direct { direction.direct() } else { direction.into() }
}

pub(crate) fn read(args: &Read, output: Output) -> Result<(), Failure> {
    let session = Session::open(&args.peer, args.chunk, &args.over)?;
    let index = session.index()?;
    let entry = index.find(&args.name)?;
    let length = args.length.unwrap_or(entry.length.saturating_sub(args.offset));
    let stretch = Stretch::new(&session, entry, args.offset, length, args.chunk)?;
    let mut sink: Box<dyn io::Write> = match &args.output {
        Some(path) => {
            Box::new(File::create(path).map_err(|error| format!("cannot create {}: {error}", path.display()))?)
        }
        None => Box::new(io::stdout().lock()),
    };
    let (start, bar) = (Instant::now(), output.bar(length));
    let mut bytes = vec![0; usize::try_from(stretch.local.len())?];
    let mode = mode(Direction::Read, args.direct);
    for (at, part) in stretch.parts() {
        stretch.submit(mode, at, part)?;
        let bytes = &mut bytes[..usize::try_from(part)?];
        stretch.local.read(0, bytes)?;
        sink.write_all(bytes)?;
        bar.inc(part);
    }
    sink.flush()?;
    bar.finish_and_clear();
    output.moved("read", length, start.elapsed(), &stretch.over(), mode.profile);
    Ok(())
}

pub(crate) fn write(args: &Write, output: Output) -> Result<(), Failure> {
    let failed = |error: io::Error| format!("cannot read {}: {error}", args.input.display());
    let mut input = File::open(&args.input).map_err(failed)?;
    let length = input.metadata().map_err(failed)?.len();
    let session = Session::open(&args.peer, args.chunk, &args.over)?;
    let index = session.index()?;
    let stretch = Stretch::new(&session, index.find(&args.name)?, args.offset, length, args.chunk)?;
    let (start, bar) = (Instant::now(), output.bar(length));
    let mut bytes = vec![0; usize::try_from(stretch.local.len())?];
    let mode = mode(Direction::Write, args.direct);
    for (at, part) in stretch.parts() {
        let bytes = &mut bytes[..usize::try_from(part)?];
        input.read_exact(bytes).map_err(failed)?;
        stretch.local.write(0, bytes)?;
        stretch.submit(mode, at, part)?;
        bar.inc(part);
    }
    bar.finish_and_clear();
    output.moved("wrote", length, start.elapsed(), &stretch.over(), mode.profile);
    if let Some(message) = &args.notify {
        let notification = Notification::new(&args.name, message);
        session.engine.send_notification(&session.source, &notification, session.left())?;
    }
    Ok(())
}

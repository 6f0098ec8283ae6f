//! 8 MiB READ and WRITE against a bare socket pair that moves the same bytes: side by side, alternating, medians.
//!
//! `cargo bench -p verbs-engine --bench socket_pair -- [--rounds N] [--bytes N] [--socket-buffer N]`
//!
//! The bare pair is what one would write without a library: a request of 52 bytes one way and the payload the other (for
//! WRITE: request, go-ahead, payload, acknowledgement), `read_exact` and `write_all` on buffers that are there already.
//! Both ends check nothing and copy nothing. The engine, with its staged profile, has to deliver into registered memory that
//! is unchanged until all bytes have arrived, under its lock; with the direct one it receives into it, as the bare pair does.

use std::{
    error::Error,
    hint::black_box,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    time::{Duration, Instant},
};

use verbs_engine::{
    Config, Direction, Engine, Mode, Permission, RegisteredMemory, RemoteSegment, ServeDirect, TransferRequest,
};

const PATIENCE: Duration = Duration::from_secs(30);
const REQUEST: usize = 52;
const REPLY: usize = 36;
const WARM_UP: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let (mut rounds, mut bytes, mut socket_buffer) = (101_usize, 8_usize << 20, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next();
        let number = || value.as_deref().unwrap_or_default().parse();
        match argument.as_str() {
            "--rounds" => rounds = number()?,
            "--bytes" => bytes = number()?,
            "--socket-buffer" => socket_buffer = Some(number()?),
            "--bench" | "--test" => rounds = if argument == "--test" { 3 } else { rounds },
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let mut bare = Bare::start(bytes)?;
    let engines = Engines::start(bytes, socket_buffer)?;
    println!("{bytes} bytes, {rounds} rounds, alternating; medians (quartiles; fastest) in microseconds");
    for direction in [Direction::Read, Direction::Write] {
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        for round in 0..rounds + WARM_UP {
            // Each is once the first, once the second, once the third: who comes behind whom has no bearing then.
            for turn in 0..times.len() {
                let who = (round + turn) % times.len();
                let time = match who {
                    0 => timed(|| bare.run(direction))?,
                    1 => timed(|| engines.run(direction.into()))?,
                    _ => timed(|| engines.run(direction.direct()))?,
                };
                if round >= WARM_UP {
                    times[who].push(time);
                }
            }
        }
        let [bare, staged, direct] = times.each_mut().map(|times| quartiles(times));
        println!("{direction:?}: bare {}", show(bare));
        for (profile, engine) in [("staged", staged), ("direct", direct)] {
            let [of_fastest, _, ratio, _] = [0, 1, 2, 3].map(|at| bare[at].as_secs_f64() / engine[at].as_secs_f64());
            let ratios = format!("{ratio:.3} (of the fastest {of_fastest:.3})");
            println!("{direction:?}: {profile} {}, throughput ratio {ratios}", show(engine));
        }
    }
    Ok(())
}

fn timed(run: impl FnOnce() -> Result<(), Box<dyn Error>>) -> Result<Duration, Box<dyn Error>> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed())
}

/// Fastest, first quartile, median, third quartile.
fn quartiles(times: &mut [Duration]) -> [Duration; 4] {
    times.sort_unstable();
    [times[0], times[times.len() / 4], times[times.len() / 2], times[times.len() * 3 / 4]]
}

fn show([fastest, low, median, high]: [Duration; 4]) -> String {
    let [fastest, low, median, high] = [fastest, low, median, high].map(|time| time.as_micros());
    format!("{median} ({low} to {high}; {fastest})")
}

struct Bare {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Bare {
    fn start(bytes: usize) -> Result<Self, Box<dyn Error>> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().expect("a peer");
            stream.set_nodelay(true).expect("an option");
            serve(stream, bytes);
        });
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: vec![1; bytes] })
    }

    fn run(&mut self, direction: Direction) -> Result<(), Box<dyn Error>> {
        let mut request = [0; REQUEST];
        request[0] = u8::from(direction == Direction::Write);
        self.stream.write_all(&request)?;
        let mut reply = [0; REPLY];
        self.stream.read_exact(&mut reply)?;
        match direction {
            Direction::Read => self.stream.read_exact(&mut self.buffer)?,
            Direction::Write => {
                self.stream.write_all(&self.buffer)?;
                self.stream.read_exact(&mut reply)?;
            }
        }
        black_box(&self.buffer);
        Ok(())
    }
}

/// The other end, until the first closes.
fn serve(mut stream: TcpStream, bytes: usize) {
    let mut buffer = vec![2; bytes];
    let mut request = [0; REQUEST];
    while stream.read_exact(&mut request).is_ok() {
        let served = if request[0] == 0 {
            stream.write_all(&[0; REPLY]).and_then(|()| stream.write_all(&buffer))
        } else {
            let body = stream.write_all(&[0; REPLY]).and_then(|()| stream.read_exact(&mut buffer));
            body.and_then(|()| stream.write_all(&[0; REPLY]))
        };
        served.expect("the peer is there");
        black_box(&buffer);
    }
}

struct Engines {
    _source: Engine,
    _served: RegisteredMemory,
    requester: Engine,
    _local: RegisteredMemory,
    peer: RemoteSegment,
    request: TransferRequest,
}

impl Engines {
    fn start(bytes: usize, socket_buffer_bytes: Option<usize>) -> Result<Self, Box<dyn Error>> {
        let max_payload_bytes = bytes.max(8 << 20) as u64;
        let serve_direct = ServeDirect::All;
        let config = Config { max_payload_bytes, socket_buffer_bytes, serve_direct, ..Config::default() };
        let (source, requester) = (Engine::new(config.clone())?, Engine::new(config)?);
        let served = source.register_memory(vec![3; bytes].into(), Permission::RemoteReadWrite)?;
        let local = requester.register_memory(vec![4; bytes].into(), Permission::LocalOnly)?;
        let peer = requester.open_segment(source.endpoint(), source.epoch(), PATIENCE)?;
        let request =
            TransferRequest { local_address: local.address(), remote_address: served.address(), length: bytes as u64 };
        Ok(Self { _source: source, _served: served, requester, _local: local, peer, request })
    }

    fn run(&self, mode: Mode) -> Result<(), Box<dyn Error>> {
        self.requester.submit_and_wait(&self.peer, mode, &[self.request], PATIENCE)?.into_result()?;
        Ok(())
    }
}

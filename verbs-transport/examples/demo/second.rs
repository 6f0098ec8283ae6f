//! The second process: how it is started, how its address comes back, how it ends.
//!
//! It writes lines to its standard output: `address HEX` once, and `error TEXT` if it fails. Its standard input stays
//! open as long as the first process lives, and it ends when that closes: neither outlives the other.

use std::{
    io::Read as _,
    process::{ExitCode, ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    sync::{Notify, oneshot, watch},
    time::timeout,
};
use verbs_transport::{Config, Worker, WorkerAddress};

use crate::{
    args::{self, Args},
    problem::{PATIENCE, Problem},
    serve,
};

/// Opening a device and pinning memory takes seconds where both are emulated.
const START_PATIENCE: Duration = Duration::from_secs(20);

/// How a process ended, in words.
#[derive(Clone, Debug)]
pub(crate) struct End {
    good: bool,
    words: String,
}

/// The other process.
pub(crate) enum Second {
    /// A child of ours.
    Child { address: Option<oneshot::Receiver<WorkerAddress>>, end: watch::Receiver<Option<End>>, kill: Arc<Notify> },
    /// On another machine: its address came from the command line.
    Elsewhere { address: WorkerAddress },
}

impl Second {
    /// Starts this program once more.
    pub(crate) fn start(args: &Args) -> Result<Self, Problem> {
        let failed = |error: std::io::Error| Problem::Spawn(error.to_string());
        let program = std::env::current_exe().map_err(failed)?;
        let mut command = Command::new(program);
        command.args(args.for_second_process()).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let child = command.spawn().map_err(failed)?;
        let (address_in, address) = oneshot::channel();
        let (end_in, end) = watch::channel(None);
        let kill = Arc::new(Notify::new());
        tokio::spawn(watch_child(child, address_in, end_in, kill.clone()));
        Ok(Self::Child { address: Some(address), end, kill })
    }

    /// It runs already, elsewhere.
    pub(crate) fn elsewhere(address: WorkerAddress) -> Self {
        Self::Elsewhere { address }
    }

    /// Its address, once it has told it.
    pub(crate) async fn address(&mut self) -> Result<WorkerAddress, Problem> {
        match self {
            Self::Elsewhere { address } => Ok(address.clone()),
            Self::Child { address, .. } => {
                let address = address.take().ok_or_else(|| Problem::Protocol("asked twice".to_owned()))?;
                match timeout(START_PATIENCE, address).await {
                    Ok(Ok(address)) => Ok(address),
                    Ok(Err(_)) => Err(Problem::Second("ended before it told its address".to_owned())),
                    Err(_) => {
                        let waiting_for = "the second process's address".to_owned();
                        Err(Problem::Silence { after: START_PATIENCE, waiting_for })
                    }
                }
            }
        }
    }

    /// Waits for a child's death; for ever for a process elsewhere.
    pub(crate) fn death(&self) -> impl Future<Output = Problem> + Send + 'static {
        let end = match self {
            Self::Child { end, .. } => Some(end.clone()),
            Self::Elsewhere { .. } => None,
        };
        async move {
            let Some(mut end) = end else { return std::future::pending().await };
            let ended = end.wait_for(Option::is_some).await.ok().and_then(|end| end.clone());
            match ended {
                Some(end) => Problem::Second(end.words),
                None => std::future::pending().await,
            }
        }
    }

    /// A child must end by itself, and well.
    pub(crate) async fn ended(&mut self) -> Result<(), Problem> {
        let Self::Child { end, .. } = self else { return Ok(()) };
        match timeout(PATIENCE, end.wait_for(Option::is_some)).await {
            Ok(Ok(end)) => match &*end {
                Some(End { good: false, words }) => Err(Problem::Second(words.clone())),
                _ => Ok(()),
            },
            Ok(Err(_)) => Ok(()),
            Err(_) => Err(Problem::Second(format!("did not end within {} s", PATIENCE.as_secs()))),
        }
    }

    /// After a failure: ends a child that lives, and gives the better reason, for one that died by itself says why.
    pub(crate) async fn explain(&mut self, problem: Problem) -> Problem {
        let moment = Duration::from_millis(500);
        if let Ok(death) = timeout(moment, self.death()).await {
            return death;
        }
        if let Self::Child { kill, .. } = self {
            kill.notify_one();
            let _ = timeout(moment, self.death()).await;
        }
        problem
    }
}

/// Reads the child's lines and waits for its end. Dropped with the runtime, it takes the child down.
async fn watch_child(
    mut child: Child,
    address: oneshot::Sender<WorkerAddress>,
    end: watch::Sender<Option<End>>,
    kill: Arc<Notify>,
) {
    // Held open: its closing is the sign to end.
    let _stdin = child.stdin.take();
    let mut address = Some(address);
    let mut error = None;
    let lines = async {
        let Some(stdout) = child.stdout.take() else { return };
        let mut lines = BufReader::new(stdout).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            match line.split_once(' ') {
                Some(("address", hex)) => {
                    let bytes = args::from_hex(hex).unwrap_or_default();
                    let _ = address.take().map(|address| address.send(WorkerAddress::from_bytes(bytes)));
                }
                Some(("error", text)) => error = Some(text.to_owned()),
                _ => {}
            }
        }
    };
    tokio::select! {
        () = lines => {}
        () = kill.notified() => drop(child.start_kill()),
    }
    let status = tokio::select! {
        status = child.wait() => status,
        () = kill.notified() => child.kill().await.and_then(|()| child.try_wait()).map(Option::unwrap_or_default),
    };
    let words = match (error, &status) {
        (Some(error), _) => format!("failed: {error}"),
        (None, Ok(status)) => in_words(*status),
        (None, Err(error)) => format!("is lost: {error}"),
    };
    let _ = end.send(Some(End { good: status.is_ok_and(|status| status.success()), words }));
    // Only now: whoever waits for the address must find the end.
    drop(address);
}

fn in_words(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// The second process itself.
pub(crate) async fn main(args: &Args) -> ExitCode {
    end_with_parent();
    let answer = async {
        let worker = Worker::new(crate::config(args, Config::default().bind)?, crate::open(args)?)?;
        let mut inbound = worker.start().await?;
        println!("address {}", args::to_hex(worker.address().as_bytes()));
        let result = serve::serve(&worker, &mut inbound, Some(START_PATIENCE)).await;
        worker.shutdown().await;
        result
    };
    match answer.await {
        Ok(_messages) => ExitCode::SUCCESS,
        Err(problem) => {
            println!("error {problem}");
            ExitCode::FAILURE
        }
    }
}

/// Ends this process when its standard input closes.
fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(1);
    });
}

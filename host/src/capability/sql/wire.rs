//! Messages of PostgreSQL's protocol, in and out. One that is too long is not read, so that no answer fills the host's memory.

use std::io;

use bytes::BytesMut;
use futures::FutureExt as _;
use postgres_protocol::message::backend::{DATA_ROW_TAG, Header, Message};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// The longest message that is no row. A description of the most columns that a query can have takes 140 KiB.
const LONGEST: usize = 1 << 20;
/// How much is read at once.
const CHUNK: usize = 8 << 10;

/// A connection, with TLS or without.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// See the module's documentation.
pub(super) struct Wire {
    stream: Box<dyn Stream>,
    received: BytesMut,
    /// What is to be sent.
    pub(super) outgoing: BytesMut,
}

/// Why there is no message.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the connection is lost")]
    Lost(#[source] io::Error),
    #[error("a message is too long")]
    TooLong,
}

impl Wire {
    pub(super) fn new(stream: Box<dyn Stream>) -> Self {
        Self { stream, received: BytesMut::new(), outgoing: BytesMut::new() }
    }

    /// Sends what is outgoing.
    pub(super) async fn send(&mut self) -> Result<(), Error> {
        let sent = async {
            self.stream.write_all(&self.outgoing).await?;
            self.stream.flush().await
        };
        let sent = sent.await.map_err(Error::Lost);
        self.outgoing.clear();
        sent
    }

    /// The next message that answers something: notices, notifications and parameters of the session may come at any time. A row may be
    /// this long.
    pub(super) async fn next(&mut self, row: usize) -> Result<Message, Error> {
        loop {
            match self.parse(row)? {
                Some(Message::NoticeResponse(_) | Message::NotificationResponse(_) | Message::ParameterStatus(_)) => {}
                Some(message) => return Ok(message),
                None => self.read().await?,
            }
        }
    }

    fn parse(&mut self, row: usize) -> Result<Option<Message>, Error> {
        let Some(header) = Header::parse(&self.received).map_err(Error::Lost)? else { return Ok(None) };
        let longest = if header.tag() == DATA_ROW_TAG { row } else { LONGEST };
        if usize::try_from(header.len()).is_ok_and(|length| length <= longest) {
            Message::parse(&mut self.received).map_err(Error::Lost)
        } else {
            Err(Error::TooLong)
        }
    }

    async fn read(&mut self) -> Result<(), Error> {
        self.received.reserve(CHUNK);
        match self.stream.read_buf(&mut self.received).await {
            Ok(0) => Err(Error::Lost(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => Ok(()),
            Err(error) => Err(Error::Lost(error)),
        }
    }

    /// Whether the other side is silent, as it is while nothing is asked: neither gone, nor with something to say.
    pub(super) fn is_silent(&mut self) -> bool {
        self.received.is_empty() && self.read().now_or_never().is_none()
    }
}

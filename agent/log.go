package agent

import (
	"slices"
	"sync"

	"github.com/forkvm/forkvm/agent/proto"
)

const (
	// logChunk is the unit in which output is kept.
	logChunk = 4 << 10
	// maxLog is how much of one stream is kept.
	maxLog = 1 << 20
	// maxLogs is how much of all streams together is kept, beyond freeChunks of
	// each: a stream that is refused more makes do with those.
	maxLogs    = 16 << 20
	freeChunks = 2
)

// logs keeps output streams of detached commands, the newest part of each. One
// lock is for all of them: to have room, one takes from another.
type logs struct {
	mu    sync.Mutex
	taken int // chunks beyond freeChunks of each
	// ended are the logs that no command writes to any more, oldest first.
	ended []*streamLog
}

// grant allows one more chunk, if need be by emptying logs of ended commands that
// nobody is reading. mu is held.
func (l *logs) grant() bool {
	for i := 0; l.taken >= maxLogs/logChunk; {
		if i == len(l.ended) {
			return false
		}
		if old := l.ended[i]; len(old.readers) > 0 {
			i++
		} else {
			old.clear()
			l.ended = slices.Delete(l.ended, i, i+1)
		}
	}
	l.taken++
	return true
}

// forget gives up logs of a command that has ended, unless somebody reads them.
func (l *logs) forget(list ...*streamLog) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, old := range list {
		if len(old.readers) > 0 {
			return false
		}
	}
	for _, old := range list {
		old.clear()
	}
	l.ended = slices.DeleteFunc(l.ended, func(e *streamLog) bool { return slices.Contains(list, e) })
	return true
}

// streamLog is the newest part of one stream and the sink of its pump. While
// somebody reads it, nothing is dropped that the reader has not got: the command
// waits, as for a pipe. Otherwise it never waits.
type streamLog struct {
	all     *logs
	changed sync.Cond // L is &all.mu, which guards everything here
	chunks  [][]byte  // all but the last are full
	first   int64     // position in the stream of the first byte that is kept
	next    int64     // position of the next byte to come
	over    bool
	readers map[*logReader]struct{}
}

func newStreamLog(all *logs) *streamLog {
	l := &streamLog{all: all, readers: map[*logReader]struct{}{}}
	l.changed.L = &all.mu
	return l
}

func (l *streamLog) room(limit int) int {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	for {
		if n := len(l.chunks); n > 0 && len(l.chunks[n-1]) < logChunk {
			return min(limit, logChunk-len(l.chunks[n-1]))
		}
		if !l.extend() {
			l.changed.Wait()
		}
	}
}

// extend adds an empty chunk, a new one or else the oldest. It returns false while
// a reader needs that.
func (l *streamLog) extend() bool {
	if n := len(l.chunks); n < freeChunks || n < maxLog/logChunk && l.all.grant() {
		l.chunks = append(l.chunks, make([]byte, 0, logChunk))
		return true
	}
	for r := range l.readers {
		if r.at < l.first+logChunk {
			return false
		}
	}
	oldest := l.chunks[0]
	copy(l.chunks, l.chunks[1:])
	l.chunks[len(l.chunks)-1] = oldest[:0]
	l.first += logChunk
	return true
}

func (l *streamLog) take(frame []byte) {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	last := &l.chunks[len(l.chunks)-1]
	*last = append(*last, frame[proto.HeaderSize:]...)
	l.next += int64(len(frame) - proto.HeaderSize)
	l.changed.Broadcast()
}

func (l *streamLog) end() {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	l.over = true
	l.all.ended = append(l.all.ended, l)
	l.changed.Broadcast()
}

// clear drops what is kept. all.mu is held.
func (l *streamLog) clear() {
	l.all.taken -= max(0, len(l.chunks)-freeChunks)
	l.chunks, l.first = nil, l.next
}

func (l *streamLog) status() proto.StreamStatus {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	return proto.StreamStatus{Bytes: l.next, KeptFrom: l.first}
}

// logReader reads a log from somewhere on, until the stream ends or the reader
// has left.
type logReader struct {
	log  *streamLog
	at   int64
	stop int64 // read no further; -1: to the end of the stream
	left bool
}

// reader begins at a position, or at the nearest one that is kept. Without follow
// it ends where the stream is now.
func (l *streamLog) reader(from int64, follow bool) *logReader {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	r := &logReader{log: l, at: min(max(from, l.first), l.next), stop: -1}
	if !follow {
		r.stop = l.next
	}
	l.readers[r] = struct{}{}
	return r
}

// leave ends the reader, also one that waits.
func (r *logReader) leave() {
	r.log.all.mu.Lock()
	defer r.log.all.mu.Unlock()
	r.left = true
	delete(r.log.readers, r)
	r.log.changed.Broadcast()
}

// wait returns true when there is something to read, false at the end.
func (r *logReader) wait() bool {
	l := r.log
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	for r.at == l.next && r.at != r.stop && !l.over && !r.left {
		l.changed.Wait()
	}
	return !r.left && r.at != r.stop && r.at < l.next
}

// read fills p with what there is.
func (r *logReader) read(p []byte) int {
	l := r.log
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	if r.left {
		return 0
	}
	if r.stop >= 0 {
		p = p[:min(int64(len(p)), r.stop-r.at)]
	}
	n := 0
	for n < len(p) && r.at < l.next {
		chunk := l.chunks[(r.at-l.first)/logChunk]
		k := copy(p[n:], chunk[(r.at-l.first)%logChunk:])
		n += k
		r.at += int64(k)
	}
	l.changed.Broadcast()
	return n
}

// The thread that watches the streams of this process's groups (watch.h). It makes no CUDA call, so nothing
// that the program waits for in CUDA can stop it.
#ifdef TRANSFORMER_PLUGIN_CUDA
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <thread>

#include "distributed/group_state.h"

namespace transformer_plugin::expert_parallel {
namespace {

constexpr Milliseconds kLook{200};

// How one kind of wait of one group has been seen to go.
struct Progress {
  int64_t turn = 0;
  int64_t since = 0;
  int64_t told = 0;
  bool given = false;  // another rank has given a verdict
  std::shared_ptr<Roll> roll;
};

struct Watched {
  std::weak_ptr<GroupState> state;
  Progress gpu;
  Progress host;
};

[[noreturn]] void end_process(const std::string& text) {
  const std::string line = text + "\n";
  // Not through stdio: another thread may hold its lock for ever.
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) _exit(1);
  _exit(1);
}

// `since`: when this wait began; tells the others after half a second, ends the process after the timeout.
void look_at(GroupState& state, Progress& progress, const char* kind, int64_t turn, int64_t since,
             Phase phase) {
  if (!progress.roll) {
    progress.roll = std::make_shared<Roll>(state.roll(kind));
  }
  const int64_t now = steady_ms();
  const int64_t settled = state.settled.load();
  since = std::max(since, settled);
  const Milliseconds timeout(settled ? state.timeout_ms.load()
                                     : std::max(kFirstCallMs, state.timeout_ms.load()));
  if (progress.given || now - since >= timeout.count()) {
    const Verdict verdict = progress.roll->inquest(turn, place_of(phase));
    end_process(peer_error(phase, state.name, state.rank, state.size, timeout, verdict,
                           std::string(kind) == "gpu" ? "the collective did not end on the GPU"
                                                      : "the call into NCCL did not return"));
  }
  if (now - since >= kBeat.count() && now - progress.told >= kBeat.count()) {
    progress.told = now;
    progress.given = progress.roll->beat(turn, place_of(phase));
  }
}

void look_at_gpu(GroupState& state, Progress& progress) {
  const Board* board = state.board.load();
  if (!board) return;
  const int64_t ended = board->ended;
  const int64_t begun = board->begun;
  if (begun <= ended) {
    progress.turn = 0;
    return;
  }
  if (progress.turn != begun) {
    progress.turn = begun;
    progress.since = steady_ms();
  }
  look_at(state, progress, "gpu", begun, progress.since, static_cast<Phase>(board->phase));
}

void look_at_host(GroupState& state, Progress& progress) {
  const int64_t since = state.host_since.load();
  if (since == 0) return;
  look_at(state, progress, "host", state.host_turn.load(), since,
          static_cast<Phase>(state.host_phase.load()));
}

// Joined at exit. A forked child has no such thread and starts its own when it needs one.
class WatchThread {
 public:
  void add(const std::shared_ptr<GroupState>& state) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Watched& watched : groups_) {
      if (watched.state.lock() == state) return;
    }
    groups_.push_back({state, {}, {}});
    if (thread_.joinable()) return;
    thread_ = std::thread([this] { run(); });
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  // A collective that is under way when the program ends is waited for, within its timeout: after that nobody
  // would be left to end a process that cannot take its GPU down.
  bool under_way() const {
    for (const Watched& watched : groups_) {
      const std::shared_ptr<GroupState> state = watched.state.lock();
      const Board* board = state ? state->board.load() : nullptr;
      if (board && board->begun > board->ended) return true;
    }
    return false;
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stopping_ || under_way()) {
      std::erase_if(groups_, [](const Watched& watched) { return watched.state.expired(); });
      // Only this thread removes entries, and the others only append: work on a copy of the list's pointers.
      for (size_t i = 0; i < groups_.size(); ++i) {
        const std::shared_ptr<GroupState> state = groups_[i].state.lock();
        if (!state) continue;
        Watched seen = groups_[i];
        lock.unlock();
        look_at_gpu(*state, seen.gpu);
        look_at_host(*state, seen.host);
        lock.lock();
        groups_[i] = seen;
      }
      if (stopping_) {
        lock.unlock();
        std::this_thread::sleep_for(Milliseconds(10));
        lock.lock();
      } else {
        wake_.wait_for(lock, kLook, [this] { return stopping_; });
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
  std::vector<Watched> groups_;
  bool stopping_ = false;
};

WatchThread& watch_thread() {
  static std::atomic<WatchThread*> current{nullptr};
  static std::atomic<pid_t> owner{0};
  static std::mutex making;
  const std::lock_guard<std::mutex> lock(making);
  if (owner.load() != getpid()) {
    current.store(new WatchThread);  // never freed; a forked child leaves its parent's alone
    owner.store(getpid());
    std::atexit([] {
      if (owner.load() == getpid()) current.load()->stop();
    });
  }
  return *current.load();
}

}  // namespace

void watch_group(const std::shared_ptr<GroupState>& state) { watch_thread().add(state); }

const BoardMemory& group_board(GroupState& state) {
  std::call_once(state.board_made, [&] {
    state.memory = allocate_board();
    state.board.store(state.memory.board);
  });
  return state.memory;
}

}  // namespace transformer_plugin::expert_parallel
#endif

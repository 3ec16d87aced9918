/* Times training steps of llm.c's CPU program on random tokens: cc -DTESTING -DOMP -fopenmp -I LLMC llmc_step.c -lm

   ./llmc_step ROWS TOKENS STEPS     beside gpt2_124M.bin; prints "wall cpu loss" a step */
#include "train_gpt2.c"

static double seconds_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

int main(int count, char **words) {
    if (count != 4) return 2;
    int rows = atoi(words[1]), tokens = atoi(words[2]), steps = atoi(words[3]);
    size_t size = (size_t)rows * tokens;
    GPT2 model;
    gpt2_build_from_checkpoint(&model, "gpt2_124M.bin");
    int *ids = mallocCheck(size * sizeof(int)), *targets = mallocCheck(size * sizeof(int));
    srand(0);
    for (int step = 0; step < steps; step++) {
        for (size_t at = 0; at < size; at++) {
            ids[at] = rand() % model.config.vocab_size;
            targets[at] = rand() % model.config.vocab_size;
        }
        double wall = seconds_of(CLOCK_MONOTONIC), cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
        gpt2_forward(&model, ids, targets, rows, tokens);
        gpt2_zero_grad(&model);
        gpt2_backward(&model);
        gpt2_update(&model, 1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, step + 1);
        wall = seconds_of(CLOCK_MONOTONIC) - wall;
        cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - cpu;
        fprintf(stderr, "STEP %.6f %.6f %.6f\n", wall, cpu, model.mean_loss);
    }
    return 0;
}
